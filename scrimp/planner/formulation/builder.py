"""`Sketch`: collects nodes, costs and holds from many sides, and turns them into a `Problem`.

Seconds are kept by phase: in the forward or in the backward of every micro-batch, while its input or its gradient arrives from
another piece of the model, or once in a step. Bytes are held from point to point, or in two states that have no points: by every
micro-batch in flight except the modelled one (`FLIGHT`), and while other pieces of the device run (`AWAY`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.solver.problem import Edge, Hold, Node, PairHold, Problem

Numbers = NDArray[Any]
FORWARD, BACKWARD, INPUT, GRADIENT, ONCE = "forward", "backward", "input", "gradient", "once"
FLIGHT, AWAY = (-1, -1), (-2, -2)
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, TEMPORARIES, BUFFERS = "activations", "temporaries", "buffers"
MOVED, SCRATCH = "moved", "scratch"  # resharded copies and gathered weights; bytes inside resharding and inside operators


@dataclass(kw_only=True)
class _Node:
    name: str
    options: tuple[str, ...]
    spent: dict[str, Numbers] = field(default_factory=dict)
    holds: dict[tuple[int, int, str], Numbers] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Edge:
    spent: dict[str, Numbers] = field(default_factory=dict)
    holds: dict[tuple[int, int, str], Numbers] = field(default_factory=dict)


class Sketch:
    """`where`: the operator at each point."""

    def __init__(self, where: Sequence[str]) -> None:
        self.where, self.points = tuple(where), len(where)
        self.nodes: list[_Node] = []
        self.once: list[tuple[int, int, str, int]] = []  # points, kind and bytes over all devices of every tensor, counted once
        self.edges: dict[tuple[int, int], _Edge] = {}

    def node(self, name: str, options: Sequence[str]) -> int:
        self.nodes.append(_Node(name=name, options=tuple(options)))
        return len(self.nodes) - 1

    @property
    def always(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """All points and states."""
        return (0, self.points - 1), AWAY

    def cost(self, node: int, seconds: Numbers, when: str = FORWARD) -> None:
        spent = self.nodes[node].spent
        spent[when] = spent.get(when, 0) + seconds

    def hold(self, node: int, first: int, last: int, kind: str, nbytes: Numbers) -> None:
        holds = self.nodes[node].holds
        holds[first, last, kind] = holds.get((first, last, kind), 0) + nbytes

    def must_be(self, first: int, last: int, kind: str, nbytes: int) -> None:
        """Bytes over all devices, whatever is chosen: all bytes held beyond them are replicas."""
        self.once.append((first, last, kind, nbytes))

    def pair_cost(self, one: int, other: int, seconds: Numbers, when: str = FORWARD) -> None:
        """By option of the one, then of the other; for a node and itself it is a cost of the node."""
        if one == other:
            self.cost(one, np.diagonal(seconds), when)
            return
        spent = self.edge(one, other).spent
        spent[when] = spent.get(when, 0) + (seconds if one < other else seconds.T)

    def pair_hold(self, one: int, other: int, first: int, last: int, kind: str, nbytes: Numbers) -> None:
        if not nbytes.any():
            return
        if one == other:
            self.hold(one, first, last, kind, np.diagonal(nbytes))
            return
        holds = self.edge(one, other).holds
        holds[first, last, kind] = holds.get((first, last, kind), 0) + (nbytes if one < other else nbytes.T)

    def problem(self, limit_nbytes: int | None = None) -> Problem:
        return Problem(
            points=self.points,
            nodes=tuple(
                Node(
                    name=node.name,
                    options=node.options,
                    seconds=tuple(_summed(node.spent, (len(node.options),)).tolist()),
                    holds=tuple(
                        Hold(first=first, last=last, kind=kind, nbytes=tuple(nbytes.tolist()))
                        for (first, last, kind), nbytes in sorted(node.holds.items())
                        if first >= 0 and nbytes.any()
                    ),
                )
                for node in self.nodes
            ),
            edges=tuple(
                Edge(
                    nodes=pair,
                    seconds=tuple(map(tuple, _summed(edge.spent, self._shape(pair)).tolist())),
                    holds=tuple(
                        PairHold(first=first, last=last, kind=kind, nbytes=tuple(map(tuple, nbytes.tolist())))
                        for (first, last, kind), nbytes in sorted(edge.holds.items())
                        if first >= 0
                    ),
                )
                for pair, edge in sorted(self.edges.items())
            ),
            limit_nbytes=limit_nbytes,
            where=self.where,
        )

    def seconds(self, choice: Sequence[int], when: str) -> float:
        """Seconds of a choice in one phase."""
        nodes = (node.spent[when][p] for node, p in zip(self.nodes, choice, strict=True) if when in node.spent)
        edges = (edge.spent[when][choice[a], choice[b]] for (a, b), edge in self.edges.items() if when in edge.spent)
        return fsum(float(each) for each in (*nodes, *edges))

    def edge(self, one: int, other: int) -> _Edge:
        return self.edges.setdefault((min(one, other), max(one, other)), _Edge())

    def _shape(self, pair: tuple[int, int]) -> tuple[int, ...]:
        return tuple(len(self.nodes[node].options) for node in pair)


def _summed(spent: Mapping[str, Numbers], shape: tuple[int, ...]) -> Numbers:
    return sum(spent.values(), np.zeros(shape))
