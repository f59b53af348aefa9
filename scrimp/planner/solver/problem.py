"""The planner's problem in numbers, without torch: options, their seconds, and the bytes they hold over time.

    nodes     one option of each is chosen
    edges     what a pair of choices costs
    holds     bytes that a choice, or a pair of choices, keeps on a device from one point of the step to another, both included
    limit     the most that may be held at any point

An infinite cost forbids. The peak is the largest sum of holds over all points.

In JSON, equal rows of numbers are written once ("seconds", "nbytes", "options") and referred to by index: identical layers have
identical tables, and a table has few distinct rows. Infinity is written as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from scrimp.errors import PlanError, check_format

FORMAT, VERSION = "scrimp.problem", 1

Row = TypeVar("Row", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Bytes by option of a node, from point `first` to point `last`."""

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
    """Seconds of each pair of options of two nodes, which are given by index."""

    nodes: tuple[int, int]
    seconds: tuple[tuple[float, ...], ...]
    holds: tuple[PairHold, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`where`: of each point the operator that runs, for messages; or empty."""

    points: int
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    limit_nbytes: int | None = None
    where: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        from scrimp.planner.solver.check import check  # which imports this class

        check(self)

    def to_json(self) -> str:
        seconds: Pool[tuple[float | None, ...]] = Pool()
        nbytes: Pool[tuple[int, ...]] = Pool()
        options: Pool[tuple[str, ...]] = Pool()

        def finite(row: Iterable[float]) -> tuple[float | None, ...]:
            return tuple(float(value) if math.isfinite(value) else None for value in row)

        def whole(row: Iterable[int]) -> tuple[int, ...]:
            return tuple(int(value) for value in row)

        nodes = [
            [
                node.name,
                options.place(node.options),
                seconds.place(finite(node.seconds)),
                [[hold.first, hold.last, hold.kind, nbytes.place(whole(hold.nbytes))] for hold in node.holds],
            ]
            for node in self.nodes
        ]
        edges = [
            [
                *edge.nodes,
                [seconds.place(finite(row)) for row in edge.seconds],
                [[hold.first, hold.last, hold.kind, [nbytes.place(whole(row)) for row in hold.nbytes]] for hold in edge.holds],
            ]
            for edge in self.edges
        ]
        data = {
            "format": FORMAT, "version": VERSION, "points": self.points, "limit_nbytes": self.limit_nbytes,
            "options": options.rows, "seconds": seconds.rows, "nbytes": nbytes.rows, "nodes": nodes, "edges": edges,
            **({"where": self.where} if self.where else {}),
        }  # fmt: skip
        return json.dumps(data, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Problem:
        try:
            data: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"this is not a problem file of scrimp: {error}") from error
        check_format(data, FORMAT, VERSION, PlanError)
        try:
            options = [tuple(row) for row in data["options"]]
            seconds = [tuple(math.inf if value is None else value for value in row) for row in data["seconds"]]
            nbytes = [tuple(row) for row in data["nbytes"]]
            tables: Callable[[list[int]], Any] = lambda places: tuple(nbytes[place] for place in places)  # noqa: E731
            nodes = tuple(
                Node(
                    name=name,
                    options=options[names],
                    seconds=seconds[row],
                    holds=tuple(Hold(first=first, last=last, kind=kind, nbytes=nbytes[k]) for first, last, kind, k in holds),
                )
                for name, names, row, holds in data["nodes"]
            )
            edges = tuple(
                Edge(
                    nodes=(one, two),
                    seconds=tuple(seconds[place] for place in rows),
                    holds=tuple(PairHold(first=first, last=last, kind=kind, nbytes=tables(k)) for first, last, kind, k in holds),
                )
                for one, two, rows, holds in data["edges"]
            )
            points, limit, where = data["points"], data["limit_nbytes"], tuple(data.get("where", ()))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise PlanError(f"this problem is damaged: {type(error).__name__} {error}") from error
        return cls(points=points, nodes=nodes, edges=edges, limit_nbytes=limit, where=where)


class Pool(dict[Row, int]):
    """Distinct rows, each with its index."""

    def place(self, row: Row) -> int:
        return self.setdefault(row, len(self))

    @property
    def rows(self) -> list[Row]:
        return list(self)
