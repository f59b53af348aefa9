"""`python -m bench.checkpoint`."""

from bench.checkpoint.command import main

main()
