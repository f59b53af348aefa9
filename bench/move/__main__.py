"""`python -m bench.move`."""

from bench.move.command import main

raise SystemExit(main())
