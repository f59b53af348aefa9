"""`python -m bench.lowered`."""

from bench.lowered.command import main

main()
