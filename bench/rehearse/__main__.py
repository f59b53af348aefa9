"""`python -m bench.rehearse`."""

from bench.rehearse.command import main

main()
