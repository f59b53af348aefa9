"""Rehearsals beside real ranks: bytes of every point of a step, by kind.

The two sides count otherwise. Real ranks move numbers over gloo, and the engine's CPU meter counts their storages, with profiles
of operators and moves. A rehearsal counts storages on meta by weak references, and its moves reach nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from scrimp import Plan, rehearse
from scrimp.engine import Timeline
from scrimp.ext.ranks import pool
from scrimp.rehearsal import Rehearsal
from tests.engine.lowered.test_planned_pipelines import ranks_of
from tests.rank_jobs.planned import timeline as jobs
from tests.run import models

SECONDS = 240.0


def differences(plan: Plan, name: str) -> list[str]:
    """What differs between the ranks of all stages and their rehearsals: one text for each rank, empty if nothing does."""
    args, kwargs = models.batch(name)
    ran = pool(ranks_of(plan)).run(jobs.measure, plan.to_json(), name, timeout_seconds=SECONDS)
    return _all(ran, plan, models.build(name), kwargs or args)


def _all(ran: Sequence[tuple[Timeline, int]], plan: Plan, model: nn.Module, batch: Any) -> list[str]:
    found = [(rank, _first(*each, rehearse(plan, model, batch, rank))) for rank, each in enumerate(ran)]
    return [f"rank {rank}: {first}" if first else "" for rank, first in found]


def _first(line: Timeline, peak: int, found: Rehearsal) -> str:
    if peak != found.peak.nbytes:
        return f"the peak is {peak} bytes, {found.peak.nbytes} rehearsed"
    if line.points != found.points:
        return f"{len(line.points)} points, {len(found.points)} rehearsed"
    for kind in {*line.kinds, *found.kinds}:
        none = (0,) * len(line.points)
        for at, each in enumerate(zip(line.kinds.get(kind, none), found.kinds.get(kind, none), strict=True)):
            if each[0] != each[1]:
                return f"{line.points[at]}: {each[0]} bytes of {kind}, {each[1]} rehearsed"
    return ""
