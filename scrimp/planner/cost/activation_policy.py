"""The activation policies of a group: keep, recompute, or offload its saved activations.

keep        held from the operator that makes it to its last use
recompute   freed after its last use in the forward; the group's forward runs again just before its layer's backward, and its
            inputs must be there: kept by the group that made them, or recomputed by a group of the same layer
offload     copied to the host after its last use in the forward, and back for its first use in the backward
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from scrimp.planner.formulation.builder import Numbers

Each = TypeVar("Each")


@dataclass(frozen=True)
class Ways:
    """The policies of one group: its node has an option for each split and each policy, the policy varying fastest."""

    names: tuple[str, ...]

    def spread(self, numbers: Sequence[Each]) -> list[Each]:
        """Numbers that are the same for all policies."""
        return [number for number in numbers for _ in self.names]

    def repeat(self, numbers: Numbers) -> Numbers:
        return np.repeat(numbers, len(self.names))

    def only(self, way: str, numbers: Numbers) -> Numbers:
        """Numbers by split, that count for one policy alone."""
        return np.outer(numbers, [name == way for name in self.names]).reshape(-1).astype(numbers.dtype)

    def mask(self, way: str, splits: int) -> Numbers:
        return np.array([name == way for _ in range(splits) for name in self.names])

    def split_of(self, option: int) -> int:
        return option // len(self.names)

    def way_of(self, option: int) -> str:
        return self.names[option % len(self.names)]
