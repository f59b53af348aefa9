"""The linear program, with rows only for points that matter.

A problem has hundreds of points, and few of them keep a solution from being better: where others are far below the limit, their
rows say nothing, but a solver works on them ten times as long as on all the rest. So it is asked without any first. Where its
solution is over the limit, the points with more than their neighbours are given rows, and it is asked again, until it is over
at none. Every one of these programs asks less than the whole one, so what it says is a bound; and the last one's solution is
the whole one's. Rows of points that it is not over at are missing in branch and bound as well, and are given in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from scrimp.planner.solver.backend import OPTIMAL, STOPPED, Result, minimise
from scrimp.planner.solver.model import PEAK, Model, Program
from scrimp.planner.solver.points import Numbers

_OVER = 1e-6  # in the program's units: a solver may err by as much


def relaxed(model: Model, program: Callable[[], Program], limit: float, *, seconds: float, solver: str | None) -> Result:
    """`program`: with the rows that the model has by then. If the time is up: the last solution, which is over the limit, and its
    bound; it is "stopped"."""
    deadline = time.monotonic() + seconds
    known: Result | None = None
    while True:
        result = minimise(program(), whole=False, seconds=deadline - time.monotonic(), solver=solver)
        if result.status == STOPPED and known is not None:
            return replace(known, status=STOPPED)
        if result.status != OPTIMAL or result.values is None:
            return result
        if not give_rows(model, model.profile(result.values), limit + _OVER * model.units[PEAK]):
            return result
        known = result


def give_rows(model: Model, profile: Numbers, limit: float) -> bool:
    """Rows for points at which more is held than this and than at their neighbours, if there are such without one. All of them,
    though a few would do for a bound: so what is chosen by the linear program is less over in between."""
    before, after = (np.concatenate(each) for each in (([-np.inf], profile[:-1]), (profile[1:], [-np.inf])))
    over = (profile > limit) & (profile > before) & (profile >= after)
    over[model.points] = False
    if not over.any():
        return False
    model.hold(np.union1d(model.points, np.flatnonzero(over)))
    return True
