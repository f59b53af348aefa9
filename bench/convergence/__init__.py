"""`python -m bench.convergence`; see `command.py`."""
