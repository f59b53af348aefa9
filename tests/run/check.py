"""Runs a case and judges it: numbers against one process, bytes against the plan."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations

from scrimp.errors import PlanError
from scrimp.ext.ranks import RankFailure, RankTimeout, pool
from tests.rank_jobs.planned import steps as jobs
from tests.run import models
from tests.run.cases import Case
from tests.run.plans import plan_of

LOSSES = 1e-4  # relative, of AdamW: it turns gradients that are zero but for rounding into full steps
MOST, LEAST, LEAST_WIDE = 1.01, 0.95, 0.98  # of the plan's peak: measured on every rank; the last for hidden size 256
SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`faults`: what is wrong; none if all is right. `no_plan`: why there is none. `planned` and `peaks`: bytes, of the plan and
    of each rank. `off`: the largest error as a multiple of its bound."""

    faults: tuple[str, ...] = ()
    no_plan: str = ""
    planned: int = 0
    peaks: tuple[int, ...] = ()
    off: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


@cache
def losses_of(model: str, steps: int) -> list[float]:
    return jobs.plainly(models.build(model), model, steps)


def run(case: Case, steps: int) -> Verdict:
    start = time.perf_counter()
    try:
        plan = plan_of(case.model, case.mesh, case.way, case.optimizer)
    except PlanError as error:
        return Verdict(no_plan=str(error))
    middle = time.perf_counter()
    try:
        ran = pool(plan.mesh.size).run(jobs.train, plan.to_json(), case.model, steps, timeout_seconds=SECONDS)
    except (RankFailure, RankTimeout) as error:
        return Verdict(faults=(str(error)[-3000:],), planned=plan.memory.peak_nbytes)
    seconds = {"plan": round(middle - start, 2), "run": round(time.perf_counter() - middle, 2)}
    peaks = tuple(max(each.peaks) for each in ran)
    faults = [*_bytes(case.model, plan.memory.peak_nbytes, peaks)]
    if any(each.losses != ran[0].losses for each in ran):
        faults.append("ranks have different losses")
    wrong = ran[0].wrong if case.optimizer == "sgd" else _losses(ran[0].losses, losses_of(case.model, steps))
    faults += [f"{key} is off by {times:.3g} of its bound" for key, times in wrong.items() if not times <= 1]
    off = max(wrong.values())
    return Verdict(faults=tuple(faults), planned=plan.memory.peak_nbytes, peaks=peaks, off=off, seconds=seconds)


def _bytes(model: str, planned: int, peaks: tuple[int, ...]) -> Iterable[str]:
    """A rank may have less than the plan, which counts the one with most. No rank has more."""
    least = LEAST_WIDE if models.is_wide(model) else LEAST
    for rank, peak in enumerate(peaks):
        if not peak <= MOST * planned:
            yield f"rank {rank} has a peak of {peak} bytes, {peak / planned:.4f} of the plan's {planned}"
        if not least * planned <= peak:
            yield f"rank {rank} has a peak of {peak} bytes, only {peak / planned:.4f} of the plan's {planned}"


def _losses(found: list[float], wanted: list[float]) -> dict[str, float]:
    return {
        f"loss {step}": abs(one - other) / (LOSSES * abs(other))
        for step, (one, other) in enumerate(zip(found, wanted, strict=True))
    }


def misordered(found: dict[str, Verdict], least: float) -> list[str]:
    """Plans of one model, mesh and optimizer: those whose order by memory is another measured than predicted, though the
    predictions differ by more than the tolerance."""
    said = []
    for (one, a), (other, b) in permutations(found.items(), 2):
        if a.peaks and b.peaks and MOST * a.planned < least * b.planned and max(a.peaks) >= max(b.peaks):
            said.append(f"{one} takes {max(a.peaks)} bytes and {other} {max(b.peaks)}: {a.planned} and {b.planned} were planned")
    return said
