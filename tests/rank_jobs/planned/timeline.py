"""What real ranks measure at every point of a step under a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from scrimp import Engine, Plan
from scrimp.engine import Timeline, recording
from scrimp.move.run import comm
from tests.rank_jobs.planned.steps import RATES
from tests.rank_jobs.planned_engine import model_of
from tests.run import models
from tests.support.lowering.staged import batch_for

STEPS = 2  # before the one that is recorded: the meter has seen every move, and shares that others updated are gathered

Batch = Sequence[Any] | Mapping[str, Any]


def measure(plan: str, name: str) -> tuple[Timeline, int]:
    """The timeline of a step, and the peak of live storages of all steps."""

    def batch(step: int) -> Batch:
        args, kwargs = models.batch(name, step)
        return kwargs or args

    return _measured(Plan.from_json(plan), models.build(name), batch)


def measure_stage(plan: str, family: str, named: tuple[str, dict[str, Any]], rows: int, dim: int) -> tuple[Timeline, int]:
    """The same under a plan with pipeline stages."""
    return _measured(Plan.from_json(plan), model_of(*named), lambda step: batch_for(family, rows, dim, step))


def _measured(plan: Plan, model: nn.Module, batch: Callable[[int], Batch]) -> tuple[Timeline, int]:
    comm._comms.clear()  # programs are compared again, as by ranks that have just started
    engine = Engine(model, plan=plan, optimizer=RATES[plan.optimizer], precision=plan.precision, device="cpu")
    for step in range(STEPS):
        _step(engine, batch(step))
    with recording(engine) as recorder:
        _step(engine, batch(STEPS))
    peak = engine.ledger.device.live_peak.nbytes
    engine.close()
    dist.barrier()
    return recorder.timeline(), peak


def _step(engine: Engine, batch: Batch) -> None:
    if isinstance(batch, Mapping):
        engine.step(**batch)
    else:
        engine.step(*batch)
