"""What a report shows besides a plan: the price of the next best choice for each kind of layer, and the Pareto front.

Both are solved again, so they exist only in the process that made the plan.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from scrimp.errors import PlanError
from scrimp.planner.answers.explain import explain
from scrimp.planner.answers.plan import Plan
from scrimp.planner.solver.pareto import frontier

POINTS = 6


def alternatives(plan: Plan, time_limit: float) -> dict[str, Any]:
    """As plain data. `time_limit`: seconds for all of it; layers for which no time is left are not explained."""
    if time_limit <= 0:
        raise PlanError(f"time_limit={time_limit}: a search takes more than 0 seconds")
    if plan.source is None and (plan.schedule is None or any(stage.source is None for stage in plan.schedule.stages)):
        return {}
    end = time.monotonic() + time_limit
    found = [] if plan.source is None else frontier(plan.source.problem, POINTS, seconds=time_limit / 2)
    points = {(each.peak_nbytes, each.seconds) for each in found} | (
        {(plan.memory.peak_nbytes, plan.seconds)} if found else set()
    )
    paths = [layers.path for layers in plan.layers if layers.path and layers.ops]
    explained = []
    for k, path in enumerate(paths):
        left = (end - time.monotonic()) / (len(paths) - k)
        if left > 0 and not (plan.schedule is not None and plan.schedule.interleave > 1):
            explained.append(asdict(explain(plan, path, seconds=left)))
    return {
        "front": [{"peak_nbytes": peak, "seconds": seconds} for peak, seconds in _best(points)],
        "explained": explained,
    }


def _best(points: set[tuple[int, float]]) -> list[tuple[int, float]]:
    """Those that no other point beats in both; each of them is optimal up to a gap, the plan's own among them."""
    kept: list[tuple[int, float]] = []
    for peak, seconds in sorted(points):
        if not kept or seconds < kept[-1][1]:
            kept.append((peak, seconds))
    return kept
