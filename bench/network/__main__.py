"""`python -m bench.network`."""

from bench.network.command import main

raise SystemExit(main())
