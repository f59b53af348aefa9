"""`python -m bench.memory`; see `command.py`."""
