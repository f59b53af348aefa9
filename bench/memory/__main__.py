"""`python -m bench.memory`."""

from bench.memory.command import main

raise SystemExit(main())
