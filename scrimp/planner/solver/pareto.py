"""The Pareto front between peak memory and step time."""

from __future__ import annotations

import time

from scrimp.errors import PlanError
from scrimp.planner.solver.found import Progress
from scrimp.planner.solver.problem import Problem
from scrimp.planner.solver.solve import MEMORY, TIME, Solution, begun, result


def frontier(
    problem: Problem,
    points: int = 8,
    *,
    seconds: float = 60.0,
    gap: float = 0.01,
    progress: Progress | None = None,
    solver: str | None = None,
) -> list[Solution]:
    """Up to `points` Pareto points, by growing peak and falling seconds: the least peak; the least seconds (within the problem's
    limit, if it has one); and the least seconds within limits between, at growing distances, because the first bytes save the
    most. Each solve is warm-started from the one before, which fits its limit too. With a gap above 0 each is optimal up to that
    gap."""
    if points < 2:
        raise PlanError(f"a Pareto front has 2 points or more (least memory, least time), not {points}")
    end = time.monotonic() + seconds
    session = begun(problem, solver, progress)

    def request(objective: str, limit: int | None, waiting: int) -> Solution:
        now = time.monotonic()
        return result(session, objective, limit, slack=0.0, seconds=max((end - now) / waiting, 0.1), gap=gap, begin=now)

    least = request(MEMORY, problem.limit_nbytes, points)
    fastest = request(TIME, problem.limit_nbytes, points - 1)
    span = fastest.peak_nbytes - least.peak_nbytes
    limits = [least.peak_nbytes + round(span * (k / (points - 1)) ** 2) for k in range(1, points - 1)] if span > 0 else []
    between = [request(TIME, limit, len(limits) - k) for k, limit in enumerate(limits)]
    kept: list[Solution] = []
    for solution in sorted([least, *between, fastest], key=lambda each: (each.peak_nbytes, each.seconds)):
        if not kept or solution.seconds < kept[-1].seconds:
            kept.append(solution)
    return kept
