"""One rank of one contender: `python -m bench.network.rank NAME CASE` inside its namespace, started by bench.network.

Steps are taken back to back: a pause would fill the bucket of the limit, and let the next packets through unlimited.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.machine import high_water_nbytes
from bench.network.case import Case
from bench.network.contenders import CONTENDERS
from bench.network.netns import DEVICE


def train(name: str, case: Case) -> dict[str, Any]:
    """Times are of a clock that all ranks of the machine share. `before` and `after`: at the ends of the timed steps."""
    contender, total = CONTENDERS[name], case.warm_up + CONTENDERS[name].steps(case)
    data = case.data(total, dist.get_rank())
    training = contender.build(case)
    losses, ends = [], []
    dist.barrier()
    start = time.monotonic()
    for step, (inputs, labels) in enumerate(data):
        if step == case.warm_up:
            dist.barrier()
            before, began = carried(), time.monotonic()
        losses.append(training.step(inputs, labels).item())
        ends.append(time.monotonic())
        print(f"step {step + 1} of {total}", flush=True)
    after = carried()
    return {
        "start": start,
        "began": began,
        "ends": ends,
        "losses": losses,
        "sent": after["tx"] - before["tx"],
        "received": after["rx"] - before["rx"],
        "checksum": checksum(training.weights()),
        "resident_nbytes": high_water_nbytes(),
    }


def carried() -> dict[str, int]:
    """Bytes over this rank's interface so far."""
    folder = Path(f"/sys/class/net/{DEVICE}/statistics")
    return {way: int((folder / f"{way}_bytes").read_text()) for way in ("rx", "tx")}


def checksum(weights: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in weights.values():
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    result = train(sys.argv[1], Case(**json.loads(sys.argv[2])))
    dist.barrier()  # nobody leaves while another still waits for bytes
    print(json.dumps(result), flush=True)
    os._exit(0)  # gloo has been seen to abort when it is taken apart
