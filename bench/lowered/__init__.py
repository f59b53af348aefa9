"""`python -m bench.lowered`; see `command.py`."""
