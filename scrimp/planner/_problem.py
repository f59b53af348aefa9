"""The planner's question as numbers: what can be chosen, what it costs in seconds, and which bytes it holds when.

    nodes     one option of each is chosen
    edges     what a pair of choices costs
    holds     bytes that a choice, or a pair of choices, keeps on a device from one moment (a "point") to another, both included
    limit     the most that may be held at any point

An infinite cost forbids. The peak is the largest sum of holds over all points.
"""

from __future__ import annotations

from dataclasses import dataclass

FORMAT, VERSION = "scrimp.problem", 1


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Bytes by option of a node."""

    first: int
    last: int
    kind: str
    nbytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PairHold:
    """Bytes by option of an edge's first node, then by option of its second."""

    first: int
    last: int
    kind: str
    nbytes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Node:
    name: str
    options: tuple[str, ...]
    seconds: tuple[float, ...]
    holds: tuple[Hold, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Between two nodes, by index."""

    nodes: tuple[int, int]
    seconds: tuple[tuple[float, ...], ...]
    holds: tuple[PairHold, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Problem:
    points: int
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    limit_nbytes: int | None = None
