"""`python -m bench.selection`; see `command.py`."""
