"""Validates a problem: shapes of tables, ranges of numbers, at least one option for every node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scrimp.errors import PlanError

if TYPE_CHECKING:
    from scrimp.planner.solver.problem import Hold, PairHold, Problem

MOST_NBYTES = 1 << 53  # the most bytes in a table: beyond it a float cannot represent every byte


def check(problem: Problem) -> None:
    """Raises `PlanError` if the problem is invalid. A table shared by several nodes or edges is checked once."""
    seen: dict[tuple[int, tuple[int, ...]], object] = {}
    if not _is_count(problem.points) or problem.points < 1:
        raise PlanError(f"a problem has 1 point or more, not {problem.points!r}")
    if not problem.nodes:
        raise PlanError("a problem without nodes: there is nothing to choose")
    limit = problem.limit_nbytes
    if limit is not None and (not _is_count(limit) or limit < 0):
        raise PlanError(f"limit_nbytes is a number of bytes, 0 or more, or None, not {limit!r}")
    if problem.where and (len(problem.where) != problem.points or not all(isinstance(name, str) for name in problem.where)):
        raise PlanError(f"where is a text for each of {problem.points} points, or empty; it has {len(problem.where)}")
    for i, node in enumerate(problem.nodes):
        where = f"node {i} '{node.name}'"
        if not node.options:
            raise PlanError(f"{where} has no options")
        shape = (len(node.options),)
        if (len(node.seconds),) != shape:
            raise PlanError(f"{where} has {len(node.options)} options and seconds of {len(node.seconds)}")
        _check_seconds(node.seconds, shape, where, seen)
        _check_holds(node.holds, shape, problem.points, where, seen)
    for k, edge in enumerate(problem.edges):
        one, two = edge.nodes
        if one == two or not all(_is_count(i) and 0 <= i < len(problem.nodes) for i in edge.nodes):
            raise PlanError(f"edge {k} is between nodes {one} and {two}: it takes two of the nodes 0 to {len(problem.nodes) - 1}")
        where = f"edge {k} from '{problem.nodes[one].name}' to '{problem.nodes[two].name}'"
        pair = (len(problem.nodes[one].options), len(problem.nodes[two].options))
        _check_seconds(edge.seconds, pair, where, seen)
        _check_holds(edge.holds, pair, problem.points, where, seen)


def _is_count(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _table(values: Any, shape: tuple[int, ...], where: str) -> np.ndarray[Any, Any]:
    try:
        table = np.asarray(values)
    except (ValueError, OverflowError):
        table = np.asarray(None)
    if table.shape != shape or table.dtype.kind not in "iuf":
        rows = [len(row) for row in values] if len(shape) == 2 and all(hasattr(row, "__len__") for row in values) else len(values)
        raise PlanError(f"{where} must be a table of numbers of shape {shape}, by the options of its nodes; this has {rows}")
    return table


def _check_seconds(values: Any, shape: tuple[int, ...], where: str, seen: dict[Any, object]) -> None:
    if (id(values), shape) in seen:
        return
    table = _table(values, shape, f"the seconds of {where}")
    if not (table >= 0).all():  # also catches NaN
        raise PlanError(f"the seconds of {where} must be 0 or more (infinite: forbidden), but one is {table[~(table >= 0)][0]}")
    if not np.isfinite(table).any():
        what = "no option of it" if len(shape) == 1 else "no pair of their options"
        raise PlanError(f"{where}: {what} is allowed, all {table.size} seconds are infinite")
    seen[(id(values), shape)] = values


def _check_holds(
    holds: tuple[Hold, ...] | tuple[PairHold, ...], shape: tuple[int, ...], points: int, where: str, seen: dict[Any, object]
) -> None:
    for hold in holds:
        what = f"the hold '{hold.kind}' of {where}"
        if not (_is_count(hold.first) and _is_count(hold.last) and 0 <= hold.first <= hold.last < points):
            raise PlanError(f"{what} is from point {hold.first} to {hold.last}, but the points are 0 to {points - 1}")
        if (id(hold.nbytes), shape) in seen:
            continue
        table = _table(hold.nbytes, shape, f"the bytes of {what}")
        if table.dtype.kind not in "iu" or (table < 0).any() or (table > MOST_NBYTES).any():
            raise PlanError(
                f"the bytes of {what} must be whole numbers from 0 to 2^53, but they are from {table.min()} to {table.max()}"
            )
        seen[(id(hold.nbytes), shape)] = hold.nbytes
