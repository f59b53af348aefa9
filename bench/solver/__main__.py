"""`python -m bench.solver`."""

from bench.solver.command import main

main()
