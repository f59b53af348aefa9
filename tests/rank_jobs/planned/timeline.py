"""What real ranks measure at every point of a step under a plan."""

from __future__ import annotations

import torch.distributed as dist

from scrimp import Engine, Plan
from scrimp.engine import Timeline
from scrimp.move.run import comm
from tests.rank_jobs.planned.steps import RATES
from tests.run import models

STEPS = 2  # before the one that is recorded: the meter has seen every move, and shares that others updated are gathered


def measure(plan: str, name: str) -> tuple[Timeline, int]:
    """The timeline of a step, and the peak of live storages of all steps."""
    comm._comms.clear()  # programs are compared again, as by ranks that have just started
    found = Plan.from_json(plan)
    engine = Engine(
        models.build(name), plan=found, optimizer=RATES[found.optimizer], precision=found.precision, device="cpu"
    )  # fmt: skip
    for step in range(STEPS):
        args, kwargs = models.batch(name, step)
        engine.step(*args, **kwargs)
    args, kwargs = models.batch(name, STEPS)
    with engine.recording() as recorder:
        engine.step(*args, **kwargs)
    peak = engine.ledger.device.live_peak.nbytes
    engine.close()
    dist.barrier()
    return recorder.timeline(), peak
