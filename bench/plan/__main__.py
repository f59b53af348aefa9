"""`python -m bench.plan`."""

from bench.plan.command import main

main()
