"""`python -m bench.disk`."""

from bench.disk.command import main

main()
