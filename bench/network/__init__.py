"""`python -m bench.network`; see `command.py`."""
