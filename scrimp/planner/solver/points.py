"""The points that can be the peak: those not dominated by another point."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]


def maximal_points(floor: Numbers, spans: Iterable[tuple[int, int]]) -> Numbers:
    """The points that no other dominates, in order. One point dominates another if it holds the same tensors and more, whatever
    is chosen. `floor`: bytes by point, whatever is chosen; `spans`: of holds whose bytes depend on the choice.

    A hold at two points is held at every point between. So of two neighbours (with those between removed), one dominates the
    other unless a hold of the other ends or begins between them: one pass with a stack."""
    first_end = np.full(len(floor), len(floor))  # by point, the earliest last point of its holds
    last_begin = np.full(len(floor), -1)  # by point, the latest first point of its holds
    distinct = sorted(set(spans))
    for begin, end in distinct:
        last_begin[begin : end + 1] = begin
    for begin, end in sorted(distinct, key=lambda span: -span[1]):
        first_end[begin : end + 1] = end
    kept: list[int] = []
    for point in range(len(floor)):
        while kept and first_end[kept[-1]] >= point and floor[kept[-1]] <= floor[point]:
            kept.pop()
        if not kept or last_begin[point] > kept[-1] or floor[point] > floor[kept[-1]]:
            kept.append(point)
    return np.array(kept)
