"""A problem while it is drawn up: costs of nodes and pairs are added to from many sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scrimp.planner._problem import Edge, Hold, Node, PairHold, Problem

Numbers = NDArray[Any]


@dataclass(kw_only=True)
class _Node:
    name: str
    options: tuple[str, ...]
    seconds: Numbers
    holds: dict[tuple[int, int, str], Numbers] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Edge:
    seconds: Numbers
    holds: dict[tuple[int, int, str], Numbers] = field(default_factory=dict)


class Sketch:
    """`where`: of each point what runs then."""

    def __init__(self, where: Sequence[str]) -> None:
        self.where, self.points = tuple(where), len(where)
        self.nodes: list[_Node] = []
        self.once: list[tuple[int, int, str, int]] = []  # points, kind and bytes over all devices of all that must be somewhere
        self._edges: dict[tuple[int, int], _Edge] = {}

    def node(self, name: str, options: Sequence[str]) -> int:
        self.nodes.append(_Node(name=name, options=tuple(options), seconds=np.zeros(len(options))))
        return len(self.nodes) - 1

    def cost(self, node: int, seconds: Numbers) -> None:
        self.nodes[node].seconds = self.nodes[node].seconds + seconds

    def hold(self, node: int, first: int, last: int, kind: str, nbytes: Numbers) -> None:
        holds = self.nodes[node].holds
        holds[first, last, kind] = holds.get((first, last, kind), 0) + nbytes

    def must_be(self, first: int, last: int, kind: str, nbytes: int) -> None:
        """So many bytes, over all devices, whatever is chosen: what is held beyond them is there more than once."""
        self.once.append((first, last, kind, nbytes))

    def pair_cost(self, one: int, other: int, seconds: Numbers) -> None:
        """By option of the one, then of the other; a node and itself is a cost of the node."""
        if one == other:
            self.cost(one, np.diagonal(seconds))
            return
        edge = self._edge(one, other)
        edge.seconds = edge.seconds + (seconds if one < other else seconds.T)

    def pair_hold(self, one: int, other: int, first: int, last: int, kind: str, nbytes: Numbers) -> None:
        if not nbytes.any():
            return
        if one == other:
            self.hold(one, first, last, kind, np.diagonal(nbytes))
            return
        holds = self._edge(one, other).holds
        holds[first, last, kind] = holds.get((first, last, kind), 0) + (nbytes if one < other else nbytes.T)

    def problem(self, limit_nbytes: int | None = None) -> Problem:
        return Problem(
            points=self.points,
            nodes=tuple(
                Node(
                    name=node.name,
                    options=node.options,
                    seconds=tuple(node.seconds.tolist()),
                    holds=tuple(
                        Hold(first=first, last=last, kind=kind, nbytes=tuple(nbytes.tolist()))
                        for (first, last, kind), nbytes in sorted(node.holds.items())
                        if nbytes.any()
                    ),
                )
                for node in self.nodes
            ),
            edges=tuple(
                Edge(
                    nodes=pair,
                    seconds=tuple(map(tuple, edge.seconds.tolist())),
                    holds=tuple(
                        PairHold(first=first, last=last, kind=kind, nbytes=tuple(map(tuple, nbytes.tolist())))
                        for (first, last, kind), nbytes in sorted(edge.holds.items())
                    ),
                )
                for pair, edge in sorted(self._edges.items())
            ),
            limit_nbytes=limit_nbytes,
            where=self.where,
        )

    def _edge(self, one: int, other: int) -> _Edge:
        pair = (min(one, other), max(one, other))
        if pair not in self._edges:
            shape = tuple(len(self.nodes[node].options) for node in pair)
            self._edges[pair] = _Edge(seconds=np.zeros(shape))
        return self._edges[pair]
