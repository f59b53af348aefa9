"""What test_bench_network.py has others do: `python -m tests.rank_jobs.network wait | fail | hold`."""

from __future__ import annotations

import json
import os
import sys
import time

from bench.network.netns import network


def stand_still() -> None:
    print("here", flush=True)
    time.sleep(60)


def hold() -> None:
    with network(ranks=1, mbit=40) as net:
        print(json.dumps(net.spaces()), flush=True)
        time.sleep(60)


if __name__ == "__main__":
    if sys.argv[1] == "fail" and os.environ["RANK"] == "1":
        raise ValueError("on purpose")
    {"wait": stand_still, "fail": stand_still, "hold": hold}[sys.argv[1]]()
