"""Evaluates a choice on the problem as given. It checks every solution independently of any solver."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from scrimp.errors import PlanError
from scrimp.planner.solver.problem import Problem


class Evaluation(NamedTuple):
    """`point`: the first with the peak. `kinds`: bytes by kind there, largest first. `seconds`: infinite if the choice is
    forbidden."""

    peak_nbytes: int
    point: int
    seconds: float
    kinds: dict[str, int]


def evaluate(problem: Problem, choice: Sequence[int]) -> Evaluation:
    """Peak and seconds of a choice: one option index per node."""
    change = [0] * (problem.points + 1)
    holds = list(_holds(problem, choice))
    for first, last, _, nbytes in holds:
        change[first] += nbytes
        change[last + 1] -= nbytes
    profile = list(accumulate(change[:-1]))
    peak = max(profile)
    point = profile.index(peak)
    kinds: dict[str, int] = {}
    for first, last, kind, nbytes in holds:
        if first <= point <= last and nbytes:
            kinds[kind] = kinds.get(kind, 0) + nbytes
    terms = [node.seconds[p] for node, p in zip(problem.nodes, choice, strict=True)]
    terms += [edge.seconds[choice[edge.nodes[0]]][choice[edge.nodes[1]]] for edge in problem.edges]
    # An exact sum does not depend on the order, so equal choices have equal seconds.
    return Evaluation(peak, point, math.fsum(terms), dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))))


def held_nbytes(problem: Problem, choice: Sequence[int]) -> int:
    """The sum of all bytes held, each hold counted once."""
    return sum(nbytes for _, _, _, nbytes in _holds(problem, choice))


def _holds(problem: Problem, choice: Sequence[int]) -> Iterator[tuple[int, int, str, int]]:
    if len(choice) != len(problem.nodes):
        raise PlanError(f"a choice of {len(choice)} options for {len(problem.nodes)} nodes")
    for node, p in zip(problem.nodes, choice, strict=True):
        if not 0 <= p < len(node.options):
            raise PlanError(f"node '{node.name}' has {len(node.options)} options, there is none with index {p}")
        for hold in node.holds:
            yield hold.first, hold.last, hold.kind, int(hold.nbytes[p])
    for edge in problem.edges:
        for pair in edge.holds:
            yield pair.first, pair.last, pair.kind, int(pair.nbytes[choice[edge.nodes[0]]][choice[edge.nodes[1]]])
