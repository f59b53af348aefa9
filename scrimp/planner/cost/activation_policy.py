"""What becomes of what a group saves for its backward: it is kept, made again, or sent to the host and back.

keep        it is there from when it was made to when it was last used
recompute   it goes after its last use in the forward, and the group's forward runs again just before its layer's backward;
            what that needs must be there: kept by who made it, or made again by a group of the same layer
offload     it goes to the host after its last use in the forward, and comes back for its first in the backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from scrimp.planner.build.builder import Numbers

KEEP, RECOMPUTE, OFFLOAD = "keep", "recompute", "offload"
WAYS = (KEEP, RECOMPUTE, OFFLOAD)
Each = TypeVar("Each")


@dataclass(frozen=True)
class Ways:
    """Of one group: its node has an option for each way to split and each of these, the latter running faster."""

    names: tuple[str, ...]

    def spread(self, numbers: Sequence[Each]) -> list[Each]:
        """What is the same for all ways."""
        return [number for number in numbers for _ in self.names]

    def repeat(self, numbers: Numbers) -> Numbers:
        return np.repeat(numbers, len(self.names))

    def only(self, way: str, numbers: Numbers) -> Numbers:
        """Numbers by way to split, that count for one of these alone."""
        return np.outer(numbers, [name == way for name in self.names]).reshape(-1).astype(numbers.dtype)

    def mask(self, way: str, splits: int) -> Numbers:
        return np.array([name == way for _ in range(splits) for name in self.names])

    def split_of(self, option: int) -> int:
        return option // len(self.names)

    def way_of(self, option: int) -> str:
        return self.names[option % len(self.names)]
