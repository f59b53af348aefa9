"""What goes wrong on one rank of several that train under a plan."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from scrimp import Engine, Memory, Plan, zoo
from scrimp.checkpoint import _save
from scrimp.errors import FitError, RunError
from scrimp.lower import Arrived
from tests.rank_jobs.planned_engine import engine_of

AT_FAULT = 1


def fault(plan: str, name: str, rows: int, kind: str, at: int, seconds: float, started: bool = False) -> tuple[str, float]:
    """In the second step rank 1 skips, or reorders, its `at`-th collective, dies or hangs in it: what a rank says, and when.
    `started`: of those that run beside operators."""
    engine = engine_of(plan, name, {})
    batch = zoo.example_batch(name, rows)
    reached = _spoil(engine, kind, at, seconds, started) if dist.get_rank() == AT_FAULT else lambda: True
    engine.step(*batch)
    dist.barrier()
    start = time.monotonic()
    try:
        engine.step(*batch)
    except RunError as error:
        if kind in ("dead", "killed"):  # the pool tells what ranks raised, if one is gone
            raise
        return str(error), time.monotonic() - start
    assert reached(), f"the step has no collective {at}"
    return "", time.monotonic() - start


def _spoil(engine: Engine, kind: str, at: int, seconds: float, started: bool) -> Callable[[], bool]:
    """`accumulate` is bound when the first step generates the functions: so it is replaced before that. Returns what says whether
    the step has reached the collective."""
    comm, weights = engine._run.under_plan.comm, engine._run.under_plan.weights
    call, accumulate, count = comm.start if started else comm.move, weights.accumulate, 0
    held: list[tuple[Any, ...]] = []

    def spoiled(program: Any, local: torch.Tensor, *, donate: bool) -> Any:
        nonlocal count
        count += bool(engine.optimizer.steps)
        if count != at or not engine.optimizer.steps:
            return call(program, local, donate=donate)
        match kind:
            case "dead":
                os._exit(9)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hung":
                time.sleep(seconds)
                return call(program, local, donate=donate)
        made = torch.zeros(program.dst.local_shape(program.shape, program.mesh, comm.rank), dtype=local.dtype)
        return Arrived(made) if started else made

    def swapped(*args: Any, donate: bool) -> None:
        nonlocal count
        count += bool(engine.optimizer.steps)
        if count == at:
            held.append(args)
            return
        accumulate(*args, donate=donate)
        if held:
            accumulate(*held.pop(), donate=False)

    if kind == "reordered":
        weights.accumulate = swapped  # type: ignore[method-assign]
    else:
        setattr(comm, "start" if started else "move", spoiled)
    return lambda: count >= at


def saves_and_dies(plan: str, name: str, rows: int, folder: str, rank: int, moment: int) -> None:
    """A checkpoint after two steps; after one more a second one in the same folder, in which a rank is killed at the given one of
    its calls."""
    engine = engine_of(plan, name, {})
    for step in range(2):
        engine.step(*zoo.example_batch(name, rows, step=step))
    engine.save(folder)
    engine.step(*zoo.example_batch(name, rows, step=2))
    calls = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    if dist.get_rank() == rank:
        for owner, function in ((_save.ShardFile, "_reserve"), (_save.ShardFile, "close"), (_save, "flush"), (_save, "commit")):
            setattr(owner, function, dying(getattr(owner, function)))
        _save.os.replace = dying(os.replace)  # type: ignore[assignment]
        _save.shutil.rmtree = dying(_save.shutil.rmtree)  # type: ignore[assignment]
    engine.save(folder)


def too_small(plan: str, name: str, rows: int, share: float) -> tuple[str, bool]:
    """Steps with a budget of a share of the plan's peak: the error, and whether the weights are those of before."""
    nbytes = int(share * Plan.from_json(plan).memory.peak_nbytes)
    torch.manual_seed(0)
    before = dict(zoo.build(name).state_dict())
    try:
        engine = engine_of(plan, name, {}, memory=Memory(device=nbytes))
    except FitError as error:
        return f"{type(error).__name__}: {error}", True
    try:
        engine.step(*zoo.example_batch(name, rows))
    except FitError as error:
        same = all(torch.equal(value, before[key]) for key, value in engine.iter_state())
        return f"{type(error).__name__}: {error}", same
    return "", False
