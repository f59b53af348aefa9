"""A lower bound for every plan on a mesh, over all sharding options and with free per-layer choices.

The relaxed problem has every sharding option but no resharding cost, and each kind of state at rest is sharded as far as
possible. Without edges it is small. In a run of identical layers the last is a node of its own and all others choose together.
Only points of layers on their own count. The bound is the value of the linear program. If each layer chose freely, the average of
their choices would be a feasible point of that program: so the bound also holds for such plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from scrimp.planner.cost.zero_levels import Precision
from scrimp.planner.deadline import Deadline
from scrimp.planner.formulation.on_mesh import OnMesh
from scrimp.planner.shard.layer_runs import Part
from scrimp.planner.solver.model import PEAK
from scrimp.planner.solver.problem import Hold, Problem
from scrimp.planner.solver.session import Session

_ANY_GAP = 0.99  # only the bound of the linear program is needed, not a solution
_SECONDS = 20.0


def bound_on(
    on: OnMesh, precision: Precision, ways: Sequence[str], objective: str = PEAK, limit: int | None = None, *,
    deadline: Deadline | None = None,
) -> float:  # fmt: skip
    """A lower bound of the peak, of the bytes held, or of the seconds within the limit. Past the deadline it skips the linear
    program, and the bound is weaker."""
    assembly = on.assembly(precision, ways, alone=True)
    points = sorted(point for part in assembly.parts if part.count == 1 for point in _points(part))
    problem = _at(assembly.sketch.problem(), points)
    most = inf if limit is None or objective == PEAK else limit
    session = Session(problem)
    seconds = _SECONDS if deadline is None else min(_SECONDS, deadline.left())
    return session.minimise(objective, limit=most, seconds=seconds, gap=_ANY_GAP).phase.bound


def _points(part: Part) -> list[int]:
    return [*map(part.again, range(part.model.forward_ops)), *map(part.point, range(len(part.model.graph.ops)))]


def _at(problem: Problem, points: Sequence[int]) -> Problem:
    """The problem restricted to these points."""

    def kept(hold: Hold) -> Hold | None:
        first, last = int(np.searchsorted(points, hold.first)), int(np.searchsorted(points, hold.last, "right")) - 1
        return replace(hold, first=first, last=last) if first <= last else None

    nodes = tuple(
        replace(node, holds=tuple(each for each in map(kept, node.holds) if each is not None)) for node in problem.nodes
    )
    return replace(problem, points=len(points), nodes=nodes, where=())
