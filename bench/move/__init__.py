"""`python -m bench.move`; see `command.py`."""
