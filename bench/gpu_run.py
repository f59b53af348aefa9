"""One contender at one point, in a process of its own: prints one line of JSON. `python -m bench.gpu_run NAME CASE`."""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import torch

from bench.gpu_contenders import CONTENDERS, Case
from bench.machine import high_water_nbytes
from scrimp.ledger import parse_nbytes

WARM_UP, STEPS = 3, 5


def run(name: str, case: Case) -> dict[str, object]:
    cuda = case.device == "cuda"
    if cuda and name != "scrimp":  # scrimp keeps the cap itself
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, parse_nbytes(case.cap) / total))
    start = time.perf_counter()
    step = CONTENDERS[name](case)
    built = time.perf_counter() - start
    data = case.data()
    losses, seconds = [], []
    for k in range(WARM_UP + STEPS):
        start = time.perf_counter()
        losses.append(step(data))
        if k == WARM_UP - 1 and cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    if cuda:
        torch.cuda.synchronize()
    seconds[-1] += time.perf_counter() - start  # what is left over is part of the last step
    timed = seconds[WARM_UP:]
    return {
        "built_s": built,
        "median_s": median(timed),
        "least_s": min(timed),
        "most_s": max(timed),
        "losses": [float(loss) for loss in losses],
        "reserved_nbytes": torch.cuda.max_memory_reserved() if cuda else 0,
        "host_nbytes": high_water_nbytes(),
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], Case(**json.loads(sys.argv[2])))))
