"""`python -m bench.run`."""

from bench.run.command import main

if __name__ == "__main__":
    main()
