"""What real ranks measure at every point of a step under a plan."""

from __future__ import annotations

import torch.distributed as dist

from scrimp import Engine, Plan
from scrimp.engine import Timeline, recording
from scrimp.move.run import comm
from tests.rank_jobs.planned.steps import RATES
from tests.run import models

STEPS = 2  # before the one that is recorded: the meter has seen every move, and shares that others updated are gathered


def measure(plan: str, name: str) -> tuple[Timeline, int]:
    """The timeline of a step, and the peak of live storages of all steps."""
    comm._comms.clear()  # programs are compared again, as by ranks that have just started
    given = Plan.from_json(plan)
    engine = Engine(
        models.build(name), plan=given, optimizer=RATES[given.optimizer], precision=given.precision, device="cpu"
    )  # fmt: skip
    for step in range(STEPS):
        _step(engine, name, step)
    with recording(engine) as recorder:
        _step(engine, name, STEPS)
    peak = engine.ledger.device.live_peak.nbytes
    engine.close()
    dist.barrier()
    return recorder.timeline(), peak


def _step(engine: Engine, name: str, step: int) -> None:
    args, kwargs = models.batch(name, step)
    engine.step(*args, **kwargs)
