"""Moves beside operators, on real ranks: against the same steps without, and while another rank is held back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from scrimp import zoo
from scrimp.engine.lowered import weights as engine_weights
from scrimp.lower import Buckets, Lowered, Overlap
from scrimp.move import default_store
from tests.rank_jobs.planned_engine import engine_of, train

HELD_BACK = 1


def without(_lowered: Lowered, buckets: Buckets, _later: Any) -> Overlap:
    return Overlap(room_nbytes={key: left[0] for key, left in buckets.left.items()})


def both(plan: str, name: str, rows: int, steps: int, **options: Any) -> tuple[bool, bool, list[int]]:
    """Whether losses, and parameters on rank 0, have the same bits with and without; and the peaks of both."""
    beside = train(plan, name, {}, rows, steps, **options)
    with mock.patch.object(engine_weights, "overlap_of", without):
        alone = train(plan, name, {}, rows, steps, **options)
    same = all(torch.equal(beside[1][key], alone[1][key]) for key in alone[1])
    return beside[0] == alone[0], same, [each[2]["peak"] for each in (beside, alone)]


def held_back(plan: str, name: str, rows: int) -> tuple[list[str], list[float]]:
    """In the second step rank 1 starts none of its moves before rank 0 has run the operators behind its own start of it. If a
    start waited for other ranks, both would wait for ever. Returns what rank 0 did, in order, and the losses."""
    engine = engine_of(plan, name, {})
    weights, comm, store = engine._run.under_plan.weights, engine._run.under_plan.comm, default_store()
    events: list[str] = []
    unsaid: list[str] = []
    count = 0

    def on_its_way(program: Any, local: torch.Tensor, *, donate: bool) -> Any:
        nonlocal count
        if not engine.optimizer.steps:
            return start(program, local, donate=donate)
        count += 1
        number = f"overlap/{count}"
        if comm.rank == HELD_BACK:
            store.wait([number])
        handle = start(program, local, donate=donate)
        unsaid.append(number)
        events.append(f"start {count}")
        wait, mine = handle.wait, count

        def waited() -> torch.Tensor:
            events.append(f"wait {mine}")
            return wait()

        handle.wait = waited
        return handle

    def behind_operators(call: Callable[..., Any], what: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            events.append(what)
            while unsaid:
                number = unsaid.pop()
                if comm.rank == 0:
                    store.set(number, "")
            return call(*args, **kwargs)

        return run

    start = comm.start
    comm.start = on_its_way  # type: ignore[method-assign]
    for what in ("gather", "accumulate", "leave"):
        setattr(weights, what, behind_operators(getattr(weights, what), what))
    losses = [float(engine.step(*zoo.example_batch(name, rows, step=step))) for step in range(2)]
    dist.barrier()
    return events, losses
