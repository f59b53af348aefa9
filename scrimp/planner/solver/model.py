"""The integer program, as arrays.

Variables (of the reduced problem, `solver/presolve.py`)

    s[i,p]      1 if node i takes option p                              binary
    e[l,a,b]    1 if link l has class a at its one end, b at the other  continuous, for allowed pairs only; whole if s is
    z, z'       the peak, and all held bytes
    one         1: what is constant in an objective is its cost
    u[t]        bytes at point t                                        only where points are telescoped

Constraints                                                             added by

    sum_p s[i,p] = 1                      for every node                _choose
    sum_b e[l,a,b] = sum_{p in a} s[i,p]  for every class a             _agree
    sum_a e[l,a,b] = sum_{q in b} s[j,q]  for every class b             _agree
    floor[t] + sum w s + sum w e <= z     for points that have rows     _hold_points, or, where that has far fewer entries,
    u[t] = u[t-1] + born - died, u[t] <= z                              _hold_telescoped
    sum of all held bytes <= z'           one row                       _hold_sum
    sum of s and e over a cover < parts   one row for each of them      forbid

Objectives: z (the peak), the held bytes, or the seconds. A limit is an upper bound of z or z', so that its reduced cost in the
last linear program is the price of a byte. `_caps` fixes variables to 0 that no better choice can have: an option that alone
is over the limit, or slower than a choice that is known. Without a limit its rows are left out.

Bytes are counted in units in which the limit, or the peak of a choice that is known, is 1,000 above what is there whatever is
chosen, at the point where there is most room; seconds in such that a known choice takes 1,000. So a solver's tolerances (1e-9
here) are 1e-12 of the objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from scrimp.planner.solver.points import Numbers
from scrimp.planner.solver.presolve import Costs, Reduced, Span

SCALE = 1e3
_FAR_FEWER = 3
PEAK, HELD, SECONDS = "peak", "held", "seconds"


@dataclass(frozen=True, kw_only=True)
class Program:
    """minimise cost x, rows_lower <= A x <= rows_upper, lower <= x <= upper; A by columns (start, index, value)."""

    cost: Numbers
    lower: Numbers
    upper: Numbers
    whole: Numbers
    rows_lower: Numbers
    rows_upper: Numbers
    start: Numbers
    index: Numbers
    value: Numbers


class Model:
    """Rows are in bytes, programs made of them in `units`: of bytes at a point, of bytes in all, and of seconds. `points`: those
    that have rows; by default all, but there can be fewer (`solver/lazy_rows.py`). Columns follow the order of the list above."""

    def __init__(self, reduced: Reduced, points: Numbers | None = None) -> None:
        self.reduced = reduced
        self.units = {PEAK: 1.0, HELD: 1.0, SECONDS: 1.0}
        self.base = int(reduced.floor.max())
        self.options: list[Numbers] = []
        self.pairs: list[Numbers] = []  # of a link: column by pair of classes, -1 where it is forbidden
        count = 0
        for node in reduced.nodes:
            self.options.append(np.arange(count, count + len(node.seconds)))
            count += len(node.seconds)
        self.binaries = count
        for link in reduced.links:
            allowed = np.isfinite(link.costs.seconds)
            columns = np.full(allowed.shape, -1)
            columns[allowed] = np.arange(count, count + allowed.sum())
            self.pairs.append(columns)
            count += int(allowed.sum())
        self.pair_count = count - self.binaries
        self.peak, self.held, self.one = range(count, count + 3)
        self._entries: list[tuple[Numbers, Numbers, Numbers]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._choose()
        self._agree()
        self._agreed = len(self._lower)
        self._forbidden: list[tuple[tuple[int, ...], int | None]] = []
        self.hold(np.arange(len(reduced.floor)) if points is None else points)

    def hold(self, points: Numbers) -> None:
        """Keeps rows for these points alone, in order; the program ignores all others."""
        del self._entries[self._agreed :], self._lower[self._agreed :], self._upper[self._agreed :]
        self.points = points
        self.usage = self.one + 1 + np.arange(len(points) if self.telescoped else 0)
        self.columns = self.one + 1 + len(self.usage)
        if len(self.usage):
            self._hold_telescoped()
        else:
            self._hold_points()
        self._hold_sum()
        self.sum_row = len(self._lower) - 1
        self.point_rows = slice(self._agreed, self.sum_row)
        for choice, point in self._forbidden:
            self._forbid(choice, point)
        self._assemble()

    def _assemble(self) -> None:
        rows, columns, values = (np.concatenate(each) for each in zip(*self._entries, strict=True))
        order = np.lexsort((rows, columns))
        self.index, self.value = rows[order], values[order]
        self.column = columns[order]
        self.rows = len(self._lower)

    def restart(self, units: dict[str, float], points: Numbers | None = None) -> None:
        """Resets the units and the points with rows; removes the rows against choices of other limits."""
        self.units, points = units, self.points if points is None else points
        if self._forbidden or not np.array_equal(points, self.points):
            self._forbidden = []
            self.hold(points)

    def forbid(self, choice: tuple[int, ...], point: int | None) -> None:
        """Adds a row against a choice that exceeds a limit at a point (None: in the sum of all held bytes) by less than the
        solver's tolerance, and against all choices that hold as much there: one of the parts that hold something must hold
        less."""
        self._forbidden.append((choice, point))
        self._forbid(choice, point)
        self._assemble()

    def _forbid(self, choice: tuple[int, ...], point: int | None) -> None:
        columns, parts = [], 0
        for (costs, at), (_, places) in zip(self.reduced.picked(choice), self.parts, strict=True):
            tables = [costs.held] if point is None else [t for first, last, t in costs.spans if first <= point <= last]
            for table in tables:
                if table[at]:
                    parts += 1
                    columns.append(places[(table >= table[at]) & (places >= 0)])
        self._row(np.concatenate(columns), np.ones(sum(map(len, columns))), -np.inf, parts - 1.0)

    @cached_property
    def parts(self) -> list[tuple[Costs, Numbers]]:
        """Costs and their columns, of all nodes and links."""
        nodes = [(costs, columns) for costs, columns in zip(self.reduced.nodes, self.options, strict=True)]
        return nodes + [(link.costs, columns) for link, columns in zip(self.reduced.links, self.pairs, strict=True)]

    @property
    def telescoped(self) -> bool:
        """Whether rows of changes have far fewer entries than rows of points. If not, rows of points are better: a solver sees in
        each of them that options exclude one another, and closes the gap of the least peak two to three times as fast."""
        whole = changes = 0
        for costs, _ in self.parts:
            spans = self._spans(costs)
            whole += sum((last - first + 1) * int(np.count_nonzero(table)) for first, last, table in spans)
            changes += sum(int(np.count_nonzero(table)) for _, table in _changes(spans, len(self.points)))
        return bool(_FAR_FEWER * (changes + 4 * len(self.points)) < whole + len(self.points))

    def _spans(self, costs: Costs) -> list[Span]:
        """The spans at points that have rows, with points renumbered from 0."""
        ends = np.array([(first, last + 1) for first, last, _ in costs.spans]).reshape(-1, 2)
        places = np.searchsorted(self.points, ends).tolist()
        return [(first, end - 1, table) for (first, end), (_, _, table) in zip(places, costs.spans, strict=True) if first < end]

    def _row(self, columns: Any, values: Any, lower: float, upper: float) -> None:
        columns = np.asarray(columns, np.int64)
        self._entries.append((np.full(len(columns), len(self._lower)), columns, np.asarray(values, float)))
        self._lower.append(lower)
        self._upper.append(upper)

    def _choose(self) -> None:
        for columns in self.options:
            self._row(columns, np.ones(len(columns)), 1.0, 1.0)

    def _agree(self) -> None:
        for link, pairs in zip(self.reduced.links, self.pairs, strict=True):
            for side in (0, 1):
                options = self.options[link.nodes[side]]
                for k in range(pairs.shape[side]):
                    row = pairs.take(k, side)
                    row, taken = row[row >= 0], options[link.classes[side] == k]
                    self._row(np.concatenate([row, taken]), np.repeat([1.0, -1.0], [len(row), len(taken)]), 0.0, 0.0)

    def _hold_points(self) -> None:
        floor = self.reduced.floor[self.points]
        columns: list[list[Numbers]] = [[] for _ in floor]
        values: list[list[Numbers]] = [[] for _ in floor]
        for costs, places in self.parts:
            for first, last, table in self._spans(costs):
                held = table != 0
                for point in range(first, last + 1):
                    columns[point].append(places[held])
                    values[point].append(table[held])
        for point, here in enumerate(columns):
            space = self.base - int(floor[point])
            self._row(np.concatenate([*here, [self.peak]]), np.concatenate([*values[point], [-1.0]]), -np.inf, space)

    def _hold_telescoped(self) -> None:
        floor = self.reduced.floor[self.points]
        columns: list[list[Numbers]] = [[] for _ in floor]
        values: list[list[Numbers]] = [[] for _ in floor]
        constants = np.diff(floor, prepend=self.base)
        for costs, places in self.parts:
            for point, table in _changes(self._spans(costs), len(floor)):
                columns[point].append(places[table != 0])
                values[point].append(-table[table != 0])
        for point, here in enumerate(columns):
            before = [self.usage[point - 1]] if point else []
            chain = np.concatenate([[self.usage[point]], before]), np.concatenate([[1.0], -np.ones(len(before))])
            change = float(constants[point])
            self._row(np.concatenate([*here, chain[0]]), np.concatenate([*values[point], chain[1]]), change, change)
            self._row([self.usage[point], self.peak], [1.0, -1.0], -np.inf, 0.0)

    def _hold_sum(self) -> None:
        parts = [(places[costs.held != 0], costs.held[costs.held != 0]) for costs, places in self.parts]
        columns = np.concatenate([*(places for places, _ in parts), [self.held]])
        self._row(columns, np.concatenate([*(held for _, held in parts), [-1.0]]), -np.inf, 0.0)

    def program(self, objective: str, limit: float, held: float, seconds: float, least: float = 0) -> Program:
        """The program that minimises one of PEAK, HELD, SECONDS within a peak, a sum of held bytes and seconds. `least`: lower
        bound of the peak; points that cannot reach it are left out."""
        cost, lower, upper = np.zeros(self.columns), np.zeros(self.columns), np.ones(self.columns)
        if objective == SECONDS:
            for costs, places in self.parts:
                allowed = places >= 0
                cost[places[allowed]] = costs.seconds[allowed] / self.units[SECONDS]
            cost[self.one] = self.reduced.seconds / self.units[SECONDS]
        elif objective == PEAK:
            cost[[self.peak, self.one]] = 1.0, self.base / self.units[PEAK]
        else:
            cost[[self.held, self.one]] = 1.0, self.reduced.held / self.units[HELD]
        lower[self.one] = 1.0
        lower[self.peak] = max(least - self.base, 0) / self.units[PEAK]
        lower[self.usage], upper[self.usage] = -np.inf, np.inf
        upper[self.peak] = (limit - self.base) / self.units[PEAK]
        upper[self.held] = (held - self.reduced.held) / self.units[HELD]
        self._caps(upper, limit, held, seconds)
        whole = np.zeros(self.columns, bool)
        whole[: self.binaries] = True
        used = np.ones(self.rows, bool)
        used[self.point_rows] = objective == PEAK or limit < np.inf
        used[self.sum_row] = objective == HELD or held < np.inf
        # Drop the bytes of options that cannot be chosen: they may be huge.
        kept = used[self.index] & (upper[self.column] != 0)
        row_units = np.ones(self.rows)
        row_units[self.point_rows], row_units[self.sum_row] = self.units[PEAK], self.units[HELD]
        own = self.column >= self.binaries + self.pair_count  # z and u are in units already
        value = np.where(own, self.value, self.value / row_units[self.index])
        return Program(
            cost=cost, lower=lower, upper=upper, whole=whole, index=self.index[kept], value=value[kept],
            start=np.concatenate([[0], np.cumsum(np.bincount(self.column[kept], minlength=self.columns))]),
            rows_lower=np.where(used, self._lower, -np.inf) / row_units,
            rows_upper=np.where(used, self._upper, np.inf) / row_units,
        )  # fmt: skip

    def _caps(self, upper: Numbers, limit: float, held: float, seconds: float) -> None:
        room = limit - self.reduced.floor
        spare = seconds - self.reduced.seconds - sum(float(costs.seconds.min()) for costs, _ in self.parts)
        for costs, places in self.parts:
            over = (costs.seconds - costs.seconds.min() > spare) | (costs.held > held - self.reduced.held)
            for first, last, table in costs.spans:
                over |= table > room[first : last + 1].min()
            upper[places[over & (places >= 0)]] = 0.0

    def profile(self, values: Numbers) -> Numbers:
        """Bytes by point of a fractional solution, also at points without rows."""
        change = np.zeros(len(self.reduced.floor) + 1)
        for costs, places in self.parts:
            taken = np.where(places >= 0, values[places], 0.0)
            if not taken.any():
                continue
            for first, last, table in costs.spans:
                held = float((table * taken).sum())
                change[first] += held
                change[last + 1] -= held
        return self.reduced.floor + np.cumsum(change[:-1])

    def read(self, values: Numbers) -> tuple[int, ...]:
        """The option with the largest value of every free node; ties go to the first."""
        return tuple(int(np.argmax(np.round(values[columns], 9))) for columns in self.options)

    def write(self, choice: tuple[int, ...]) -> Numbers:
        """The choice as a vector of variables."""
        values = np.zeros(self.columns)
        for (costs, at), (_, places) in zip(self.reduced.picked(choice), self.parts, strict=True):
            values[places[at]] = 1.0
            values[self.held] += costs.held[at] / self.units[HELD]
        above = (self.reduced.profile(choice) - self.base) / self.units[PEAK]
        values[self.usage] = above[self.points][: len(self.usage)]
        values[self.peak] = above.max()
        values[self.one] = 1.0
        return values


def _changes(spans: Sequence[Span], points: int) -> list[tuple[int, Numbers]]:
    """The changes of bytes by point; spans are ordered and do not overlap."""
    changes: dict[int, Numbers] = {}
    for first, last, table in spans:
        changes[first] = changes[first] + table if first in changes else table
        if last + 1 < points:
            changes[last + 1] = -table
    return sorted(changes.items())
