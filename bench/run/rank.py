"""One rank of `python -m bench.run --mbit ...`: runs the job in the given file, and prints what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from bench.run.ways import in_turns


def main(path: str) -> None:
    given = json.loads(Path(path).read_text())
    dist.init_process_group("gloo")
    found = in_turns(*given["job"], **given["rest"])
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
