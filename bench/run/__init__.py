"""`python -m bench.run`; see `command.py`."""
