"""The interface to parameters that a plan splits over ranks: what a slot of the table holds of its parameter.

Without a plan a slot holds all of its parameter. Under a plan it holds this rank's share of a tile, flat. The engine implements
this with the plan's placements.
"""

from __future__ import annotations

from typing import Protocol

import torch

Box = tuple[tuple[int, int, int], ...]  # of each factor of a parameter's dims: its size, where the tile begins, the tile's length


class Tiling(Protocol):
    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole parameter."""

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """What this rank's slot holds of a whole parameter, flat."""

    def whole(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        """The whole parameter on every rank, from the part that each rank updates: a collective."""

    def counts(self, name: str) -> bool:
        """Whether this rank is the first of those that update the same part."""

    def extent(self, name: str, rank: int) -> tuple[Box, int, int] | None:
        """The tile of a rank, and [start, stop) of its elements, flat, that the rank updates. None if another rank, the first of
        them, updates the same."""

    def label(self, name: str, rank: int) -> str:
        """Tells the parts that ranks update of a parameter apart: equal for replicas, and empty for all of the parameter."""
