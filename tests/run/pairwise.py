"""A small set of cases in which every pair of values of two different factors occurs, if it can."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations, product

Row = tuple[Hashable, ...]


def pairs_of(row: Row) -> set[tuple[int, Hashable, int, Hashable]]:
    """All pairs of values in a case, with their factors."""
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def pairwise(factors: Sequence[Sequence[Hashable]], possible: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Greedy: always the case with most pairs that no earlier one has; the first of them in the order of the factors."""
    rows = [row for row in product(*factors) if possible(row)]
    of = {row: pairs_of(row) for row in rows}
    left = set().union(*of.values()) if rows else set()
    found = []
    while left:
        best = max(rows, key=lambda row: len(of[row] & left))
        left -= of[best]
        found.append(best)
    return found
