"""`python -m bench.convergence`."""

from bench.convergence.command import main

main()
