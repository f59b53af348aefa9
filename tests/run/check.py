"""Runs a case and judges it: numbers against one process, bytes against the plan."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations

from scrimp import Plan
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
    """`faults`: what is wrong; none if all is right. `no_plan`: why there is none. `planned` and `peaks`: bytes of each rank, as
    the plan says and as measured. `off`: the largest error as a multiple of its bound."""

    faults: tuple[str, ...] = ()
    no_plan: str = ""
    planned: tuple[int, ...] = ()
    peaks: tuple[int, ...] = ()
    off: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)


@cache
def losses_of(model: str, steps: int, micro_batches: int) -> list[float]:
    return jobs.plainly(models.build(model), model, steps, micro_batches)


def planned_of(plan: Plan) -> tuple[int, ...]:
    """The plan's peak of each rank: ranks of a stage have the same."""
    stages = [plan.memory] if plan.schedule is None else [stage.memory for stage in plan.schedule.stages]
    return tuple(each.peak_nbytes for each in stages for _ in range(plan.mesh.size))


def run(case: Case, steps: int) -> Verdict:
    start = time.perf_counter()
    try:
        plan = plan_of(case.model, case.mesh, case.way, case.optimizer, case.stages, case.interleave)
    except PlanError as error:
        return Verdict(no_plan=str(error))
    middle, planned = time.perf_counter(), planned_of(plan)
    try:
        ran = pool(len(planned)).run(jobs.train, plan.to_json(), case.model, steps, timeout_seconds=SECONDS)
    except (RankFailure, RankTimeout) as error:
        return Verdict(faults=(str(error)[-20000:],), planned=planned)
    seconds = {"plan": round(middle - start, 2), "run": round(time.perf_counter() - middle, 2)}
    peaks = tuple(max(each.peaks) for each in ran)
    faults = [*_bytes(case.model, planned, peaks)]
    if any(each.losses != ran[0].losses for each in ran):
        faults.append("ranks have different losses")
    micro_batches = 1 if plan.schedule is None else plan.schedule.micro_batches
    wrong = ran[0].wrong
    if case.optimizer == "adamw":
        wrong = _losses(ran[0].losses, losses_of(case.model, steps, micro_batches))
    faults += [f"{key} is off by {times:.3g} of its bound" for key, times in wrong.items() if not times <= 1]
    return Verdict(faults=tuple(faults), planned=planned, peaks=peaks, off=max(wrong.values()), seconds=seconds)


def _bytes(model: str, planned: tuple[int, ...], peaks: tuple[int, ...]) -> Iterable[str]:
    """A rank may have less than the plan, which counts the one with most. No rank has more."""
    least = LEAST_WIDE if models.is_wide(model) else LEAST
    for rank, (peak, most) in enumerate(zip(peaks, planned, strict=True)):
        if not peak <= MOST * most:
            yield f"rank {rank} has a peak of {peak} bytes, {peak / most:.4f} of the plan's {most}"
        if not least * most <= peak:
            yield f"rank {rank} has a peak of {peak} bytes, only {peak / most:.4f} of the plan's {most}"


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
        if not a.peaks or not b.peaks:
            continue
        first, second = max(a.planned), max(b.planned)
        if MOST * first < least * second and max(a.peaks) >= max(b.peaks):
            said.append(f"{one} takes {max(a.peaks)} bytes and {other} {max(b.peaks)}: {first} and {second} were planned")
    return said
