"""What no plan on a mesh can be below, whatever is looked at, and if every layer could choose for itself.

The problem is drawn up with all ways to split, but nothing is moved, and of each kind of what is at rest there is as little as
can be: without edges it is small. Of a run of alike layers the last stands alone and all others together; only moments of layers
that stand alone count, and the linear program is asked. So if layers chose each for itself, what they choose on average would
be a solution: the bound is below that plan too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from scrimp.planner.build.on_mesh import OnMesh
from scrimp.planner.cost.zero_levels import Precision
from scrimp.planner.deadline import Deadline
from scrimp.planner.shard.layer_runs import Part
from scrimp.planner.solver.model import PEAK
from scrimp.planner.solver.problem import Hold, Problem
from scrimp.planner.solver.session import Session

_ANY_GAP = 0.99  # the linear program's bound is what is wanted, not a solution
_SECONDS = 20.0


def bound_on(
    on: OnMesh, precision: Precision, ways: Sequence[str], objective: str = PEAK, limit: int | None = None, *,
    deadline: Deadline | None = None,
) -> float:  # fmt: skip
    """Bytes of the peak, or bytes held or seconds within the limit. Past the deadline the linear program is left out, and the
    bound is lower."""
    assembly = on.assembly(precision, ways, alone=True)
    points = sorted(point for part in assembly.parts if part.count == 1 for point in _points(part))
    problem = _at(assembly.sketch.problem(), points)
    most = inf if limit is None or objective == PEAK else limit
    session = Session(problem)
    seconds = _SECONDS if deadline is None else min(_SECONDS, deadline.left())
    return session.minimise(objective, limit=most, seconds=seconds, gap=_ANY_GAP).phase.bound


def _points(part: Part) -> list[int]:
    return [part.again, *map(part.point, range(len(part.model.graph.ops)))]


def _at(problem: Problem, points: Sequence[int]) -> Problem:
    """With these points alone."""

    def kept(hold: Hold) -> Hold | None:
        first, last = int(np.searchsorted(points, hold.first)), int(np.searchsorted(points, hold.last, "right")) - 1
        return replace(hold, first=first, last=last) if first <= last else None

    nodes = tuple(
        replace(node, holds=tuple(each for each in map(kept, node.holds) if each is not None)) for node in problem.nodes
    )
    return replace(problem, points=len(points), nodes=nodes, where=())
