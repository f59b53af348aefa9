"""Presolve: a smaller problem with the same optimal choices.

arcs       an option that every option of a neighbour forbids is removed, and so on along the edges (arc consistency)
points     only those that can be the peak (`solver/points.py`)
least      bytes and seconds common to all options become a constant
settled    a node with one option left is a constant; its edges become costs of their other ends
dominated  an option is removed if another of its node costs no more seconds, holds no more bytes at any point, and is no
           worse on every edge with every option at the other end; of equals the first stays
classes    on an edge, options with the same row of costs and holds are one class: 36 options with 8 rows make a side of 8
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from scrimp.errors import PlanError
from scrimp.planner.solver.points import Numbers, maximal_points
from scrimp.planner.solver.problem import Problem

_SOME = 64  # numbers of two options that are compared first
Span = tuple[int, int, Numbers]  # first and last point, bytes by option or by pair


@dataclass(kw_only=True)
class Costs:
    """Costs of a node by option, or of an edge by pair. `held`: bytes of all its holds, each hold once."""

    seconds: Numbers
    held: Numbers
    spans: list[Span] = field(default_factory=list)

    def take(self, options: Numbers, side: int) -> None:
        self.seconds, self.held = self.seconds.take(options, side), self.held.take(options, side)
        self.spans = [(first, last, table.take(options, side)) for first, last, table in self.spans]

    def add(self, other: Costs) -> None:
        self.seconds, self.held = self.seconds + other.seconds, self.held + other.held
        self.spans = [*self.spans, *other.spans]

    def row(self, option: int, side: int) -> Costs:
        spans = [(first, last, table.take(option, side)) for first, last, table in self.spans]
        return Costs(seconds=self.seconds.take(option, side), held=self.held.take(option, side), spans=spans)

    def side(self, side: int) -> Numbers:
        """All its numbers, one row for every option of one side; forbidden ones are infinite."""
        tables = [self.seconds, self.held, *(table for _, _, table in self.spans)]
        allowed = np.isfinite(self.seconds)
        if not allowed.all():
            tables = [np.where(allowed, table, np.inf) for table in tables]
        return np.concatenate([(table.T if side else table).reshape(table.shape[side], -1) for table in tables], axis=1)

    def matters(self, side: int) -> bool:
        """Whether the options of a side differ."""
        seconds = self.seconds.T if side else self.seconds
        if (seconds != seconds[0]).any():
            return True  # most do, so checking the first is usually enough
        rows = self.side(side)
        return bool((rows != rows[0]).any())

    def tidy(self) -> None:
        """Merges spans into ordered ones that do not overlap, without empty ones."""
        cuts = sorted({p for first, last, _ in self.spans for p in (first, last + 1)})
        spans: list[Span] = []
        for begin, end in pairwise(cuts):
            tables = [table for first, last, table in self.spans if first <= begin and end <= last + 1]
            table = np.sum(tables, axis=0) if tables else None
            if table is None or not table.any():
                continue
            if spans and spans[-1][1] == begin - 1 and np.array_equal(spans[-1][2], table):
                spans[-1] = (spans[-1][0], end - 1, table)
            else:
                spans.append((begin, end - 1, table))
        self.spans = spans


@dataclass(frozen=True, kw_only=True)
class Link:
    """An edge between two free nodes. `classes`: of each end, the class of each option; `costs`: by pair of classes."""

    nodes: tuple[int, int]
    classes: tuple[Numbers, Numbers]
    costs: Costs


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """The reduced problem. `free`: remaining nodes, by number in the problem; `options`: of every node, its remaining options;
    `instead`: of every node, by its options in the problem, a remaining one that is no worse (-1: forbidden). `seconds`, `held`,
    `floor` (by point): the constant part. `points`: remaining points, by number in the problem."""

    free: tuple[int, ...]
    options: tuple[Numbers, ...]
    instead: tuple[Numbers, ...]
    nodes: tuple[Costs, ...]
    links: tuple[Link, ...]
    seconds: float
    held: int
    floor: Numbers
    points: Numbers

    def picked(self, choice: Sequence[int]) -> Iterator[tuple[Costs, Any]]:
        """Of a choice of the free nodes: all costs, the nodes' and then the links', and the index of the choice in their
        tables."""
        yield from zip(self.nodes, choice, strict=True)
        for link in self.links:
            one, two = link.nodes
            yield link.costs, (link.classes[0][choice[one]], link.classes[1][choice[two]])

    def profile(self, choice: Sequence[int]) -> Numbers:
        """Bytes by point, as an array."""
        profile = self.floor.copy()
        for costs, at in self.picked(choice):
            for first, last, table in costs.spans:
                profile[first : last + 1] += table[at]
        return profile

    def original(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Maps a choice of the free nodes to one of all nodes."""
        whole = [0] * len(self.options)
        for i, p in zip(self.free, choice, strict=True):
            whole[i] = p
        return tuple(int(options[p]) for options, p in zip(self.options, whole, strict=True))

    def reduced(self, choice: Sequence[int]) -> tuple[int, ...] | None:
        """Maps a choice of all nodes to one of the free nodes that is no worse; None if it is forbidden."""
        picked = [int(self.instead[i][choice[i]]) for i in self.free]
        return None if min((int(i[p]) for i, p in zip(self.instead, choice, strict=True)), default=0) < 0 else tuple(picked)


def reduce(problem: Problem) -> Reduced:
    work = _Work(problem)
    work.forbid()
    points = work.compress()
    while work.settle() | work.dominate():
        pass
    return work.result(points)


class _Work:
    """The problem while it shrinks: tables of nodes by number, of edges by the two numbers, the smaller first."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.nodes = [_costs(node.seconds, node.holds) for node in problem.nodes]
        self.edges: dict[tuple[int, int], Costs] = {}
        for edge in problem.edges:
            costs = _costs(edge.seconds, edge.holds)
            one, two = edge.nodes
            if one > two:
                one, two = two, one
                spans = [(first, last, table.T) for first, last, table in costs.spans]
                costs = Costs(seconds=costs.seconds.T, held=costs.held.T, spans=spans)
            if (one, two) in self.edges:
                self.edges[one, two].add(costs)
            else:
                self.edges[one, two] = costs
        self.around: list[list[tuple[int, int]]] = [[] for _ in self.nodes]
        for key in self.edges:
            for i in key:
                self.around[i].append(key)
        self.options = [np.arange(len(node.options)) for node in problem.nodes]
        self.instead = [np.arange(len(node.options)) for node in problem.nodes]  # by number in the problem
        self.fresh = set(range(len(self.nodes)))  # nodes changed since they were last checked
        self.seconds, self.held = 0.0, 0
        self.floor = np.zeros(problem.points, np.int64)

    def forbid(self) -> None:
        """Arc consistency."""
        todo = list(range(len(self.nodes)))
        while todo:
            i = todo.pop()
            allowed = np.isfinite(self.nodes[i].seconds)
            for key in self.around[i]:
                allowed &= np.isfinite(self.edges[key].seconds).any(axis=1 - key.index(i))
            if not allowed.any():
                name = self.problem.nodes[i].name
                others = [self.problem.nodes[j].name for key in self.around[i] for j in key if j != i]
                raise PlanError(
                    f"infeasible problem: every option of node '{name}' is forbidden, by itself or by all options left of "
                    f"its neighbours {', '.join(others[:8])}. Allow another option, or another pair of options of these"
                )
            if not allowed.all():
                self.instead[i][self.options[i][~allowed]] = -1
                self.take(i, np.flatnonzero(allowed))
                todo += [j for key in self.around[i] for j in key if j != i]

    def take(self, i: int, options: Numbers) -> None:
        self.options[i] = self.options[i][options]
        self.nodes[i].take(options, 0)
        for key in self.around[i]:
            self.edges[key].take(options, key.index(i))
            self.fresh.add(key[1 - key.index(i)])

    def compress(self) -> Numbers:
        """Moves constants to the floor, and keeps only maximal points."""
        for costs in (*self.nodes, *self.edges.values()):
            self.lower(costs)
        spans = [(first, last) for costs in (*self.nodes, *self.edges.values()) for first, last, _ in costs.spans]
        points = maximal_points(self.floor, spans)
        for costs in (*self.nodes, *self.edges.values()):
            costs.spans = [
                (int(np.searchsorted(points, first)), int(np.searchsorted(points, last, "right")) - 1, table)
                for first, last, table in costs.spans
            ]
            costs.tidy()
        self.floor = self.floor[points]
        return points

    def lower(self, costs: Costs) -> None:
        """Moves the part common to all options, or to all allowed pairs, into a constant."""
        allowed = np.isfinite(costs.seconds)
        least = costs.held[allowed].min()
        self.held += int(least)
        costs.held = np.where(allowed, costs.held - least, 0)
        spans = []
        for first, last, table in costs.spans:
            least = table[allowed].min()
            self.floor[first : last + 1] += least
            table = np.where(allowed, table - least, 0)
            if table.any():
                spans.append((first, last, table))
        costs.spans = spans

    def settle(self) -> bool:
        """Folds edges of nodes with one option, and edges on which one end does not matter, into costs of a node."""
        before = len(self.edges)
        for key, costs in list(self.edges.items()):
            for side in (0, 1):
                if not costs.matters(side):
                    other = key[1 - side]
                    self.fresh.add(other)
                    self.nodes[other].add(costs.row(0, side))
                    self.nodes[other].tidy()
                    del self.edges[key]
                    for i in key:
                        self.around[i].remove(key)
                    break
        return len(self.edges) < before

    def dominate(self) -> bool:
        gone = False
        for i, costs in enumerate(self.nodes):
            if len(costs.seconds) == 1 or i not in self.fresh:
                continue
            self.fresh.remove(i)
            rows = np.concatenate([costs.side(0), *(self.edges[key].side(key.index(i)) for key in self.around[i])], axis=1)
            some = np.ascontiguousarray(rows[:, :: -(-rows.shape[1] // _SOME)])  # a sample that tells most pairs apart
            kept: list[int] = []
            better = {}
            # Sorted by sums, so that dominating options come first; of equals the first option.
            for p in np.lexsort(
                (np.arange(len(rows)), np.where(np.isfinite(rows), rows, 0).sum(axis=1), np.isinf(rows).sum(axis=1))
            ):
                maybe = np.flatnonzero((some[kept] <= some[p]).all(axis=1))
                over = next((kept[k] for k in maybe if (rows[kept[k]] <= rows[p]).all()), None)
                if over is not None:
                    better[int(p)] = over
                else:
                    kept.append(int(p))
            for p, q in better.items():
                self.instead[i][self.instead[i] == self.options[i][p]] = self.options[i][q]
            if better:
                gone = True
                self.take(i, np.array(sorted(kept)))
        return gone

    def result(self, points: Numbers) -> Reduced:
        free = [i for i, costs in enumerate(self.nodes) if len(costs.seconds) > 1]
        for costs in (*self.nodes, *self.edges.values()):
            self.lower(costs)
            costs.tidy()
        for costs in self.nodes:
            least = costs.seconds.min()
            self.seconds += float(least)
            costs.seconds = costs.seconds - least
        places = {int(i): k for k, i in enumerate(free)}
        instead = tuple(
            np.array([int(np.searchsorted(options, p)) if p >= 0 else -1 for p in instead])
            for options, instead in zip(self.options, self.instead, strict=True)
        )
        return Reduced(
            free=tuple(free),
            options=tuple(self.options),
            instead=instead,
            nodes=tuple(self.nodes[i] for i in free),
            links=tuple(_link((places[i], places[j]), costs) for (i, j), costs in sorted(self.edges.items())),
            seconds=self.seconds,
            held=self.held,
            floor=self.floor,
            points=points,
        )


def _costs(seconds: Any, holds: Any) -> Costs:
    table = np.asarray(seconds, float)
    spans = [(int(hold.first), int(hold.last), np.asarray(hold.nbytes, np.int64)) for hold in holds]
    held = sum((span[2] for span in spans), np.zeros(table.shape, np.int64))
    return Costs(seconds=table, held=held, spans=spans)


def _link(nodes: tuple[int, int], costs: Costs) -> Link:
    """Merges options with equal rows into one class, numbered by first occurrence."""
    classes = []
    for side in (0, 1):
        seen: dict[bytes, int] = {}
        classes.append(np.array([seen.setdefault(row.tobytes(), len(seen)) for row in costs.side(side)]))
    for side in (0, 1):
        costs.take(np.unique(classes[side], return_index=True)[1], side)
    return Link(nodes=nodes, classes=(classes[0], classes[1]), costs=costs)
