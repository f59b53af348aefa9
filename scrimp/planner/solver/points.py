"""Which points can be the peak: those whose holds are not all held at another point too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]


def maximal_points(floor: Numbers, spans: Iterable[tuple[int, int]]) -> Numbers:
    """Of points with `floor` bytes whatever is chosen, and holds over these spans whose bytes depend on the choice: the points
    that no other makes needless (it holds the same and more, whatever is chosen). In order.

    What is held at two points is held at every point between. So a point that lies next to another, with those between gone,
    is within it unless one of its holds ends, or begins, on the way: one pass with a stack."""
    first_end = np.full(len(floor), len(floor))  # of what is held here, the first last point
    last_begin = np.full(len(floor), -1)  # and the last first one
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
