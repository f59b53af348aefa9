"""`python -m bench.disk`; see `command.py`."""
