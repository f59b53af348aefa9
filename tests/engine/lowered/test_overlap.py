"""Moves beside operators under a plan: the same bits, the same peak, and really at the same time."""

from __future__ import annotations

import pytest

from scrimp import Plan
from scrimp.ext.ranks import pool
from scrimp.lower import buckets_of, later_axes, lower, overlap_of
from tests.engine.lowered.test_planned_steps import ROWS
from tests.lower.test_ranks import planned
from tests.rank_jobs.planned import overlap as jobs

NAME = "gpt-tiny"


@pytest.mark.parametrize(
    ("mesh", "way"), [("x=4", "zero-3"), *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("x=2,y=2", "least"), ("x=2,y=2", "zero-3-full"), ("x=4", "ddp"), ("x=2", "zero-2"),
    ))],
)  # fmt: skip
def test_a_step_has_the_same_bits_and_stays_within_the_plan(mesh: str, way: str) -> None:
    plan = planned(NAME, {}, mesh, way)
    limit = 1.01 * Plan.from_json(plan.to_json()).memory.peak_nbytes
    for losses, weights, peaks in pool(plan.mesh.size).run(jobs.both, plan.to_json(), NAME, ROWS, 4):
        assert losses
        assert weights
        assert max(peaks) <= limit


def test_ranks_run_operators_while_moves_are_on_their_way() -> None:
    plan = planned(NAME, {}, "x=4", "zero-3")
    lowered = lower(plan, plan.source.graph)
    later = later_axes((lowered,), accumulated=False)
    found = overlap_of(lowered, buckets_of(lowered, later), later)
    events, losses = pool(4).run(jobs.held_back, plan.to_json(), NAME, ROWS)[0]
    starts = [each for each in events if each.startswith("start")]
    assert len(starts) == sum(map(len, found.starts.values())) + len(found.ends)
    for each in starts:
        first, last = events.index(each), events.index(each.replace("start", "wait"))
        assert any(what in ("gather", "accumulate", "leave") for what in events[first + 1 : last])
    assert losses[0] > 0
