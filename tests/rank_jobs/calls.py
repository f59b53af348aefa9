"""What ranks do in the tests of calls that differ."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scrimp.chunks.tables.optimizers import SGD
from scrimp.engine import Engine, Memory
from scrimp.errors import ScrimpError
from scrimp.exchange import Sparse

BATCH = torch.ones(2, 4)


def engine_for(**settings: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    memory = Memory(device="1GiB")
    return Engine(model, optimizer=SGD(lr=0.1), memory=memory, device="cpu", precision="fp32", loss=torch.mean, **settings)


def call(engine: Engine, name: str) -> None:
    match name:
        case "step" | "evaluate" | "backward":
            getattr(engine, name)(BATCH)
        case "save" | "load":
            getattr(engine, name)(Path(tempfile.mkdtemp()) / "checkpoint")
        case "iter_state":
            dict(engine.iter_state())
        case "nothing":
            pass
        case _:
            getattr(engine, name)()


def differ(names: tuple[str, ...], sparse: bool) -> tuple[str, float]:
    """Each rank makes a call of its own, after two steps together: what it raised, and after how long."""
    engine = engine_for(exchange=Sparse(density=0.5, small=0)) if sparse else engine_for()
    for _ in range(2):
        engine.step(BATCH)
    start = time.monotonic()
    try:
        call(engine, names[dist.get_rank()])
    except ScrimpError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def alike() -> list[int]:
    """All calls that there are, on all ranks, in one order."""
    engine = engine_for()
    folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(folder)
    engine.step(BATCH)
    engine.evaluate(BATCH)
    engine.save(Path(folder[0]) / "checkpoint")
    engine.step(BATCH)
    engine.load(Path(folder[0]) / "checkpoint")
    engine.state_dict()
    dict(engine.iter_state())
    engine.step(BATCH)
    return engine._run.calls.row


def cost(times: int) -> float:
    """Seconds that a step's call takes, in the middle."""
    engine = engine_for()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        engine._run.calls.begin("step")
        seconds.append(time.perf_counter() - start)
    return median(seconds)
