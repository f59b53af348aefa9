"""One contender at one point, in a process of its own: `python -m bench.gpu.run NAME CASE`.

It prints a line of JSON after each mode (unclipped, clipped), with all that is known so far. Nobody is made to wait inside
a step: a step's end is an event on the current stream, and a step's time the interval between two of them. So an update
that runs beside the next forward counts in the next interval, and the window's end waits for the last one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from bench.gpu.cases import Case
from bench.gpu.contenders import CONTENDERS, PACKAGES, SCRIMP
from bench.gpu.contenders_folder import add_contenders
from bench.machine import high_water_nbytes
from scrimp.ledger import parse_nbytes


class Clock:
    """Marks in the stream of the device; without one, the time of day."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Both must have been reached."""
        return float(start.elapsed_time(end)) / 1000 if self._cuda else float(end - start)

    def reach(self, mark: Any) -> None:
        if self._cuda:
            mark.synchronize()

    def reach_all(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def run(name: str, case: Case) -> None:
    cuda = case.device == "cuda"
    if cuda and name != SCRIMP:  # scrimp keeps the cap itself
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, parse_nbytes(case.cap) / total))
    start = time.perf_counter()
    training, clock = CONTENDERS[name](case), Clock(case.device)
    clock.reach_all()
    result: dict[str, Any] = {"built_s": time.perf_counter() - start, "modes": {}}
    losses: list[torch.Tensor] = []
    reserved = 0
    for mode, norm, warm_up in case.modes():
        if training.clip is not None:
            training.clip(norm)
        elif norm is not None:
            break
        marks = []
        for _ in range(warm_up + case.steps):
            losses.append(training.step())
            marks.append(clock.mark())
            reserved = max(reserved, torch.cuda.memory_reserved() if cuda else 0)  # peaks that others reset are no peaks
        clock.reach(marks[-1])
        left = time.perf_counter()
        training.wait()
        clock.reach_all()
        left = time.perf_counter() - left  # what the last step left to be done
        times = [clock.seconds(before, after) for before, after in pairwise(marks[warm_up - 1 :])]
        result["modes"][mode] = {
            "median_s": median(times),
            "least_s": min(times),
            "most_s": max(times),
            "first_s": [clock.seconds(before, after) for before, after in pairwise(marks[:warm_up])],
            "window_s": sum(times) + left,
            **training.report(),
        }
        result["losses"] = [float(loss) for loss in losses]
        result["reserved_nbytes"] = reserved
        result["resident_nbytes"] = high_water_nbytes()
        print("\n" + json.dumps(result, default=str), flush=True)


if __name__ == "__main__":
    if sys.argv[1] in PACKAGES:  # nobody else: transformers makes use of whatever it finds
        add_contenders()
    run(sys.argv[1], Case(**json.loads(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)  # taking apart 100 GiB of pinned memory piece by piece takes long, and is the system's affair
