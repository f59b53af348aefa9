"""Cuts a sequence of layers into pipeline stages when a stage's value is expensive to compute and a lower bound is cheap.

    minimise   score(the largest value of a stage, the sum of a cost over stages)

A dynamic program over layers and stages finds, for each allowed largest value, the least sum. It runs on lower bounds instead of
values. Of the cut it finds, the stage with the largest bound is solved exactly, and so on until all stages of the cut are exact.
Bounds never exceed values, so no other cut is better.

A solved stage also bounds every stage that contains it: its value plus the lower bound of the additional layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf

import numpy as np

from scrimp.planner.formulation.builder import Numbers

Cut = tuple[int, ...]  # the first layer of each stage, then the end


def best_cut(values: Numbers, costs: Numbers, score: Callable[[float, float], float] | None = None) -> tuple[Cut, float] | None:
    """The optimal cut. `values[s, i, j]` and `costs[s, i, j]`: of stage s with layers i to j - 1; infinite if infeasible. Without
    a score it minimises the largest value, then the sum of costs. With a score, which must grow with both, it minimises the
    score."""
    stages = len(values)
    allowed = np.unique(values[np.isfinite(values)])
    low, high = 0, len(allowed)
    while low < high:  # bisects for the smallest feasible largest value
        middle = (low + high) // 2
        if _within(values, costs, allowed[middle]) is None:
            low = middle + 1
        else:
            high = middle
    if low == len(allowed):
        return None
    if score is None:
        found = _within(values, costs, allowed[low])
        assert found is not None
        return found[0], float(allowed[low])
    best: tuple[Cut, float] | None = None
    free = _within(values, costs, inf)
    assert free is not None
    for largest in allowed[low:]:
        if best is not None and score(largest, free[1]) >= best[1]:
            break
        found = _within(values, costs, largest)
        assert found is not None
        cut, total = found
        reached = max(values[s, cut[s], cut[s + 1]] for s in range(stages))
        if best is None or score(reached, total) < best[1]:
            best = cut, score(reached, total)
    assert best is not None
    return best


def _within(values: Numbers, costs: Numbers, largest: float) -> tuple[Cut, float] | None:
    """The least sum of costs with no value above `largest`."""
    stages, ends = values.shape[0], values.shape[1]
    least = np.full(ends, inf)
    least[0] = 0.0
    came: list[Numbers] = []
    for s in range(stages):
        table = least[:, None] + np.where(values[s] <= largest, costs[s], inf)
        came.append(table.argmin(axis=0))
        least = table.min(axis=0)
    if not np.isfinite(least[-1]):
        return None
    cut = [ends - 1]
    for s in reversed(range(stages)):
        cut.append(int(came[s][cut[-1]]))
    return tuple(reversed(cut)), float(least[-1])


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What determines a stage's value: stages of one kind share it. `setting`: everything but the layers, which are given by
    their classes."""

    setting: Hashable
    layers: str
    weight: int  # of two kinds that differ in this alone, the larger weight has the larger value


@dataclass(kw_only=True)
class Search:
    """`kind(s, i, j)`; `floor(s, i, j)`: a lower bound without a search, a sum over layers; `exact(s, i, j)`: the value and its
    lower bound (they differ where the solver stopped early)."""

    layers: int
    stages: int
    kind: Callable[[int, int, int], Kind]
    floor: Callable[[int, int, int], float]
    exact: Callable[[int, int, int], tuple[float, float]]
    score: Callable[[float, float], float] | None = None
    known: dict[Kind, tuple[float, float, float]] = field(default_factory=dict)  # value, bound, floor

    def run(self, *, gap: float = 0.0, deadline: float = inf) -> tuple[Cut | None, float, float]:
        """The cut, its score, and a lower bound over all cuts. None if no cut is feasible."""
        best: tuple[Cut, float] | None = None
        while True:
            found = self._allowed(by_bound=True)
            if found is None:
                return None, inf, inf
            cut, bound = found
            exact = self._allowed(by_bound=False)
            if exact is not None and (best is None or exact[1] < best[1]):
                best = exact
            if best is not None and (best[1] - bound <= gap * best[1] or time.monotonic() > deadline):
                return best[0], best[1], min(bound, best[1])
            unknown = [s for s in range(self.stages) if self.kind(s, cut[s], cut[s + 1]) not in self.known]
            if not unknown:  # the remaining gap is that of the stages' own solves
                assert best is not None
                return best[0], best[1], min(bound, best[1])
            s = max(unknown, key=lambda s: self.floor(s, cut[s], cut[s + 1]))
            kind = self.kind(s, cut[s], cut[s + 1])
            value, least = self.exact(s, cut[s], cut[s + 1])
            self.known[kind] = (value, least, self.floor(s, cut[s], cut[s + 1]))

    def _allowed(self, *, by_bound: bool) -> tuple[Cut, float] | None:
        seen: dict[tuple[Kind, float], float] = {}

        def numbers(s: int, i: int, j: int) -> tuple[float, float]:
            kind, floor = self.kind(s, i, j), self.floor(s, i, j)
            if not by_bound:
                value = self.known[kind][0] if kind in self.known else inf
            elif (kind, floor) in seen:
                value = seen[kind, floor]
            else:
                value = seen[kind, floor] = self._bound(kind, floor)
            if self.score is not None:
                return value, value
            # Among equally good cuts, prefer one that is solved already and whose stages are identical.
            return value, (kind not in self.known) + 1e-3 * ((j - i) / self.layers) ** 2

        return best_cut(*tables(self.stages, self.layers, numbers), self.score)

    def _bound(self, kind: Kind, floor: float) -> float:
        if kind in self.known:
            return self.known[kind][1] if np.isfinite(self.known[kind][0]) else inf
        found = floor
        for other, (value, bound, its) in self.known.items():
            if other.setting == kind.setting and other.weight <= kind.weight and other.layers in kind.layers:
                found = max(found, inf if value == inf else bound + floor - its)
        return found


def tables(stages: int, layers: int, of: Callable[[int, int, int], tuple[float, float]]) -> tuple[Numbers, Numbers]:
    """Tables of values and costs for `best_cut`; every stage has at least one layer."""
    values, costs = (np.full((stages, layers + 1, layers + 1), inf) for _ in range(2))
    for s in range(stages):
        for i in [0] if s == 0 else range(s, layers):
            for j in [layers] if s == stages - 1 else range(i + 1, layers - (stages - s - 1) + 1):
                values[s, i, j], costs[s, i, j] = of(s, i, j)
    return values, costs
