"""What ranks do in the tests of the engine's sparse exchange, and an oracle that does it without an engine."""

from __future__ import annotations

import gc
import os
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from scrimp import SGD, AdamW, Engine, Memory, RunError, Sparse, zoo
from scrimp.engine.gradients import sparse
from scrimp.engine.setup.process_groups import join_world, separate
from scrimp.exchange import _bucketed_exchange
from scrimp.exchange._sparse_or_dense import Pace, measure_pace

LR, MOMENTUM = 0.05, 0.9
EPS = 1e-2  # Adam's: with less of it all of the first updates are as large as each other, and which are sent is chance
State = dict[str, torch.Tensor]


def engine_of(name: str, settings: dict[str, Any], *, seed: int = 0, placement: str = "device", **others: Any) -> Engine:
    torch.manual_seed(seed)
    optimizer = others.pop("optimizer", SGD(lr=LR, momentum=MOMENTUM))
    others = {"precision": "fp32", "memory": Memory(device="1GiB"), **others}
    exchange = Sparse(**{"choose": False, **settings})
    engine = Engine(zoo.build(name), optimizer=optimizer, device="cpu", exchange=exchange, **others)
    if placement == "host":
        engine._run.planning._on_device = frozenset()
    return engine


def batch_of(name: str, step: int, world: int, rank: int) -> list[torch.Tensor]:
    return [tensor.chunk(world)[rank] for tensor in zoo.example_batch(name, batch=8, step=step)]


def steps_of(engine: Engine, name: str, steps: range) -> list[float]:
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return [float(engine.step(*batch_of(name, step, world, rank))) for step in steps]


def train(name: str, steps: int, settings: dict[str, Any], pace: Pace | None = None, **others: Any) -> tuple[State, list[float]]:
    """`pace`: as if that had been measured."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with patch.object(sparse, "measure_pace", lambda *_: pace) if pace is not None else nullcontext():
        engine = engine_of(name, settings, seed=rank, **others)  # rank 0's weights count
    losses = steps_of(engine, name, range(steps))
    return dict(engine.iter_state()), losses


ADAM = AdamW(lr=LR / 50, eps=EPS, weight_decay=0.1)


def not_finite(name: str, placement: str, accumulate: int, **others: Any) -> tuple[list[str], bool, bool, bool, int]:
    """Rank 1 has a NaN in step 3, in its first micro-batch: what is said, whether weights stayed and residuals are sound,
    whether it goes on."""
    engine = engine_of(name, {"density": 0.05, "small": 300}, placement=placement, micro_batches=accumulate, **others)
    steps_of(engine, name, range(3))
    before = {key: value.clone() for key, value in engine.iter_state()}
    if dist.get_rank() == 1:
        factors = iter([float("nan"), 1.0])
        engine._run.loss = lambda loss: loss * next(factors)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps_of(engine, name, range(3, 4))
    engine._run.loss = None
    kept = all(torch.equal(value, before[key]) for key, value in engine.iter_state())
    held = [tensor for rest in engine._run.exchanging.residuals._held.values() for tensor in rest.tensors.values()]  # type: ignore[union-attr]
    sound = all(bool(tensor.isfinite().all()) for tensor in held)
    on = all(torch.isfinite(torch.tensor(steps_of(engine, name, range(4, 8)))))
    return [str(warning.message) for warning in caught], kept, sound, on, engine.optimizer.skipped


def fault(name: str, kind: str, folder: str | None = None) -> str:
    """Something goes wrong on rank 1 in step 2; what is said of it."""
    engine = engine_of(name, {"density": 0.05, "small": 300, "check_every": 1 if kind == "differs" else 100})
    seal = _bucketed_exchange.seal

    def changed(row: torch.Tensor, step: int, *, finite: bool = True) -> None:
        if dist.get_rank() == 1 and step == 2:
            if kind == "dead":
                os._exit(9)
            if kind == "hung":
                time.sleep(8)
        seal(row, step, finite=finite)
        if dist.get_rank() == 1 and step == 2 and kind == "corrupt":
            row[100] ^= 5

    with patch.object(_bucketed_exchange, "seal", changed):
        try:
            for step in range(4):
                if step == 2 and folder is not None:
                    engine.save(folder)
                if step == 2 and kind == "differs" and dist.get_rank() == 1:
                    engine._run.wait()
                    engine._run.store.placements[2].weights[3] += 1
                steps_of(engine, name, range(step, step + 1))
                engine._run.wait()
        except RunError as error:
            return str(error)
    return "no error"


def resumed(name: str, steps: int, stop: int, settings: dict[str, Any], folder: str, **others: Any) -> tuple[State, list[float]]:
    """Saved at `stop`, and on in a new engine."""
    engine = engine_of(name, settings, **others)
    losses = steps_of(engine, name, range(stop))
    engine.save(folder)
    again = engine_of(name, settings, seed=5, **others)
    again.load(folder)
    losses += steps_of(again, name, range(stop, steps))
    return dict(again.iter_state()), losses


def waiting(name: str, steps: int, settings: dict[str, Any], folder: str, *, load: bool) -> tuple[State, list[str]]:
    """Residuals of this rank, after some steps and saving, or after loading what other ranks have saved."""
    engine = engine_of(name, settings)
    said: list[str] = []
    if load:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.load(folder)
        said = [str(warning.message) for warning in caught]
        left = _residuals(engine)
        assert all(torch.isfinite(torch.tensor(steps_of(engine, name, range(steps, steps + 2)))))
        return left, said
    steps_of(engine, name, range(steps))
    engine.save(folder)
    return _residuals(engine), said


def _residuals(engine: Engine) -> State:
    exchange = engine._run.exchanging
    return {
        share.name: exchange.residuals.of(share.name).read(slice(0, share.numel)).clone() for _, share in exchange.with_residual()
    }  # type: ignore[union-attr]


class Thrice(nn.Module):
    """One module three times, and a weight that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.idle = nn.Linear(32, 32)
        self.out = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(x))
        return nn.functional.cross_entropy(self.out(x), y)


class Sometimes(nn.Module):
    """A layer that only some batches use, as their first sample says."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.sometimes = nn.Linear(32, 32)
        self.out = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor, use: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.before(x))
        if bool(use[0]):
            x = torch.tanh(self.sometimes(x))
        return nn.functional.cross_entropy(self.out(x), y)


def folder_of(path: Path) -> str:
    return str(path / "checkpoint")


def pace() -> Pace:
    return measure_pace(separate(join_world(torch.device("cpu"))), torch.device("cpu"), 0.01)


def threads_left(engines: int) -> tuple[int, int]:
    """Threads of this process after one engine has come and gone, and after more have. A thread that is about to end gets
    time for it: on a loaded machine it may not have run yet."""
    counts = []
    for number in range(engines):
        engine = engine_of("gpt-tiny", {"density": 0.05})
        steps_of(engine, "gpt-tiny", range(1))
        if number % 2:
            engine.close()
        del engine
        gc.collect()
        until = time.monotonic() + 20
        while len(os.listdir("/proc/self/task")) > min(counts, default=0) and counts and time.monotonic() < until:
            time.sleep(0.05)
        counts.append(len(os.listdir("/proc/self/task")))
    return counts[0], counts[-1]
