"""One rank: steps alone, saves alone, and steps beside a save, in turns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scrimp import AdamW, Engine, Memory, zoo

WARM_UP = 4  # steps: the first ones trace


def measure(settings: dict[str, Any], batch: int, precision: str, rounds: int, folder: str) -> list[dict[str, float]]:
    """Seconds of each round. The steps beside a save go on until it is complete, and there are as many alone."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", **settings)
    numel = sum(parameter.numel() for parameter in model.parameters())
    engine = Engine(model, optimizer=AdamW(), memory=Memory(device="4GiB"), precision=precision, device="cpu")
    engine._run.planning._on_device = frozenset()  # all layers stay on the host, as where they do not fit on a GPU
    data = zoo.example_batch("gpt-tiny", batch=batch, step=dist.get_rank(), **settings)

    def steps(number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            engine.step(*data)
        engine._run.wait()
        dist.barrier()
        return time.perf_counter() - start

    steps(WARM_UP)
    found = []
    for each in range(rounds):
        start = time.perf_counter()
        engine.save(Path(folder) / "waiting")
        saved = time.perf_counter() - start
        start = time.perf_counter()
        engine.save(Path(folder) / "beside", wait=False)
        called = time.perf_counter() - start
        running = engine._run.saves._running
        assert running is not None
        number = 0
        while True:
            number += 1
            engine.step(*data)
            busy = torch.tensor([int(running.thread.is_alive())])
            dist.all_reduce(busy)
            if not int(busy):
                break
        engine._run.wait()
        dist.barrier()
        beside = time.perf_counter() - start
        alone = steps(number)
        waited, copied = running.snapshot.lap(), running.snapshot.peak_nbytes
        found.append(
            {
                "round": each, "parameters": numel, "nbytes": running.save.nbytes, "save_seconds": saved, "call_seconds": called,
                "steps": number, "steps_beside_seconds": beside, "steps_alone_seconds": alone, "waited_seconds": waited,
                "copied_nbytes": copied, "added_seconds": beside - alone, "share": (beside - alone) / saved,
                "blocked_share": (called + waited) / saved,
            }
        )  # fmt: skip
    engine.close()
    return found
