"""`python -m bench.gpu`; see `command.py`."""
