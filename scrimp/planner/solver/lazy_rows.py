"""Solves the linear program with memory rows only for the points that need them.

A problem has hundreds of points, and few of them bind. Rows of points far below the limit do not change the solution, but a
solver spends ten times as long on them as on all the rest. So the first program has no such rows. Where its solution exceeds the
limit, the local maxima get rows, and the program is solved again, until no point exceeds the limit. Each of these programs is a
relaxation of the whole one, so its value is a lower bound; and the last solution solves the whole one. Branch and bound starts
from the same rows, and gets missing ones in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from scrimp.planner.solver.backend import OPTIMAL, STOPPED, Result, minimise
from scrimp.planner.solver.model import PEAK, Model, Program
from scrimp.planner.solver.points import Numbers

_OVER = 1e-6  # solver tolerance, in the program's units


def relaxed(model: Model, program: Callable[[], Program], limit: float, *, seconds: float, solver: str | None) -> Result:
    """`program`: builds the program with the rows that the model has by then. If the time is up, it returns the last solution,
    which exceeds the limit, and its bound, with status "stopped"."""
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
    """Adds rows for the local maxima above the limit that have none; returns whether there were any. It adds all of them, though
    a few would do for a bound: the relaxed solution then exceeds the limit less in between."""
    before, after = (np.concatenate(each) for each in (([-np.inf], profile[:-1]), (profile[1:], [-np.inf])))
    over = (profile > limit) & (profile > before) & (profile >= after)
    over[model.points] = False
    if not over.any():
        return False
    model.hold(np.union1d(model.points, np.flatnonzero(over)))
    return True
