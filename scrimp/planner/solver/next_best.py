"""Solves again with one choice forbidden; the difference is that choice's price.

All other nodes are free: if the forbidden choice changes one node, its neighbours may change with it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from scrimp.errors import PlanError
from scrimp.planner.solver.problem import Problem
from scrimp.planner.solver.solve import Solution, solve

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Forbidden:
    """`options` of nodes, and `pairs` of options of an edge, which is named by its two nodes."""

    options: Mapping[int, Collection[int]]
    pairs: Mapping[Pair, Collection[Pair]]

    def applied(self, problem: Problem) -> Problem | None:
        """The problem without them; None if a node has no option left."""
        nodes, edges = list(problem.nodes), list(problem.edges)
        for k, options in self.options.items():
            seconds = tuple(math.inf if p in options else each for p, each in enumerate(nodes[k].seconds))
            if min(seconds) == math.inf:
                return None
            nodes[k] = replace(nodes[k], seconds=seconds)
        at = {edge.nodes: k for k, edge in enumerate(problem.edges)}
        for ends, pairs in self.pairs.items():
            if ends not in at:
                raise PlanError(f"there is no edge between nodes {ends[0]} and {ends[1]}, so none of its pairs can be forbidden")
            edge = edges[at[ends]]
            table = tuple(
                tuple(math.inf if (p, q) in pairs else each for q, each in enumerate(row)) for p, row in enumerate(edge.seconds)
            )
            if min(map(min, table)) == math.inf:
                return None
            edges[at[ends]] = replace(edge, seconds=table)
        return replace(problem, nodes=tuple(nodes), edges=tuple(edges))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes that can change to satisfy it."""
        return (*self.options, *(node for ends in self.pairs for node in reversed(ends)))


def next_best(
    problem: Problem, choice: Sequence[int], forbidden: Forbidden, *, objective: str, seconds: float, gap: float
) -> Solution | None:
    """The best choice without the forbidden options, for the same objective and within the same limit, warm-started next to the
    old choice. None if there is no other choice; `FitError` if no other is within the limit."""
    other = forbidden.applied(problem)
    if other is None:
        return None
    return solve(other, objective=objective, seconds=seconds, gap=gap, warm=_nearest(other, choice, forbidden.nodes))


def held_at(problem: Problem, choice: Sequence[int], point: int, nodes: Collection[int]) -> tuple[dict[str, int], int]:
    """Bytes that these nodes hold at a point, by kind; and bytes of copies between one of them and others."""
    own: dict[str, int] = {}
    copies = 0
    for k in nodes:
        for hold in problem.nodes[k].holds:
            if hold.first <= point <= hold.last:
                own[hold.kind] = own.get(hold.kind, 0) + hold.nbytes[choice[k]]
    for edge in problem.edges:
        inside = sum(k in nodes for k in edge.nodes)
        for pair in edge.holds if inside else ():
            if pair.first <= point <= pair.last:
                nbytes = pair.nbytes[choice[edge.nodes[0]]][choice[edge.nodes[1]]]
                if inside == len(edge.nodes):
                    own[pair.kind] = own.get(pair.kind, 0) + nbytes
                else:
                    copies += nbytes
    return {kind: nbytes for kind, nbytes in own.items() if nbytes}, copies


def _nearest(problem: Problem, choice: Sequence[int], nodes: Iterable[int]) -> tuple[int, ...] | None:
    """Changes one of these nodes to its cheapest option given all others; None if that is forbidden."""
    for k in nodes:
        costs = list(problem.nodes[k].seconds)
        for edge in problem.edges:
            if k in edge.nodes:
                side = edge.nodes.index(k)
                there = choice[edge.nodes[1 - side]]
                row = edge.seconds[there] if side else [each[there] for each in edge.seconds]
                costs = [one + more for one, more in zip(costs, row, strict=True)]
        if min(costs) < math.inf:
            return (*choice[:k], costs.index(min(costs)), *choice[k + 1 :])
    return None
