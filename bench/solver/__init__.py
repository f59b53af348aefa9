"""`python -m bench.solver`; see `command.py`."""
