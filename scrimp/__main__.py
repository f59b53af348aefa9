"""`python -m scrimp`: the command line."""

from scrimp.cli import main

main()
