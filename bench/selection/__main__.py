"""`python -m bench.selection`."""

from bench.selection.command import main

main()
