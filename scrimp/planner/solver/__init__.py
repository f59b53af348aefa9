"""The integer program and its solution, without torch."""
