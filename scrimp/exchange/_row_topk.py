"""How many entries of a parameter are sent in a step: the top-k of each row of 65,536 elements.

Each row sends the same number of entries. So every rank's packet has the same size, which collectives need; an entry's position
in its row fits 16 bits; and the top-k is found row by row, without sorting the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

COLUMNS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RowTopK:
    """`per_row` entries from each whole row, `from_rest` from the remainder after the last one."""

    numel: int
    per_row: int
    from_rest: int

    @property
    def rows(self) -> int:
        return self.numel // COLUMNS

    @property
    def rest(self) -> int:
        return self.numel % COLUMNS

    @property
    def entries(self) -> int:
        return self.rows * self.per_row + self.from_rest

    @property
    def everything(self) -> bool:
        return self.entries == self.numel


def row_topk(numel: int, density: float) -> RowTopK:
    """At least one entry of each row, so that every row makes progress."""
    return RowTopK(numel=numel, per_row=_share(COLUMNS, density), from_rest=_share(numel % COLUMNS, density))


def _share(length: int, density: float) -> int:
    return min(length, max(1, ceil(length * density))) if length else 0
