"""`python -m bench.plan`; see `command.py`."""
