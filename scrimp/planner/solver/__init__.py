"""The integer program and its solvers; no torch."""
