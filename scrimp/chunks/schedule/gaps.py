"""Chooses which layers to keep resident from one use to the next, so that the fewest bytes are fetched again.

A gap is the time between two uses of a layer. A layer that stays over its whole gap need not be fetched for the second use. One
that is evicted in the middle must be fetched as if it had been evicted at once. So each gap is held entirely or not at all. At
every schedule step, the gaps held there must fit into the room that the step's own layers leave. The most bytes saved is a
packing problem. Layers differ in size, so no single eviction order solves it: "farthest next use first" (Belady) is optimal only
for layers of one size.

`most_saved` begins with that order, which is near optimal, and then searches by branch and bound. The search is exact if it ends
within NODES nodes, as it does for dozens of layers of different sizes, and for any number of equal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

NODES = 2000


@dataclass(frozen=True)
class Gap:
    """A layer of `nbytes` is used at schedule step `after` and next at step `before`, which is in the next training step if it is
    not later. A training step has `total` schedule steps."""

    layer: int
    nbytes: int
    after: int
    before: int
    total: int

    @cached_property
    def schedule_steps(self) -> tuple[slice, ...]:
        """The schedule steps that it spans."""
        if self.before > self.after:
            return (slice(self.after + 1, self.before),)
        return slice(self.after + 1, self.total), slice(0, self.before)

    @property
    def length(self) -> int:
        return (self.before - self.after - 1) % self.total

    def fits(self, room: NDArray[np.int64]) -> bool:
        return all(int(room[part].min(initial=self.nbytes)) >= self.nbytes for part in self.schedule_steps)

    def take(self, room: NDArray[np.int64], nbytes: int) -> None:
        for part in self.schedule_steps:
            room[part] -= nbytes

    def spans(self, schedule_step: int) -> bool:
        return any(part.start <= schedule_step < part.stop for part in self.schedule_steps)

    def inside(self, other: Gap) -> bool:
        return (self.after - other.after) % self.total + self.length <= other.length


def most_saved(gaps: Sequence[Gap], room: Sequence[int]) -> frozenset[Gap]:
    """Gaps to hold, of the most bytes in all, such that those at each schedule step fit its room."""
    left = np.array(room, dtype=np.int64)
    free = {gap for gap in gaps if not gap.nbytes or not gap.length}
    possible = [gap for gap in gaps if gap not in free and gap.fits(left)]
    # With layers of one size this is optimal: the gap that ends first can replace any other that conflicts with it.
    found = set()
    for gap in sorted(possible, key=lambda gap: (gap.before <= gap.after, gap.before, gap.layer)):
        if gap.fits(left):
            gap.take(left, gap.nbytes)
            found.add(gap)
    if len(found) < len(possible):
        found = _searched(possible, np.array(room, dtype=np.int64), found)
    return frozenset(found | free)


def _searched(gaps: Sequence[Gap], room: NDArray[np.int64], found: set[Gap]) -> set[Gap]:
    """`found`, or a better choice within NODES nodes: large gaps first, each first held and then not."""
    order = sorted(gaps, key=lambda gap: (-gap.nbytes, gap.before <= gap.after, gap.length, gap.layer))
    # Of two gaps of one size, the one inside the other is never the worse choice.
    needs = [i > 0 and order[i - 1].nbytes == gap.nbytes and order[i - 1].inside(gap) for i, gap in enumerate(order)]
    # Upper bound on the bytes saved from gap i on: all gaps that do not span the narrowest step, and its room for the others.
    narrow = _narrowest(order, room)
    crossing = [gap.spans(narrow) for gap in order]
    aside, across = [0], [0]
    for gap, crosses in zip(reversed(order), reversed(crossing), strict=True):
        aside.append(aside[-1] + (0 if crosses else gap.nbytes))
        across.append(across[-1] + (gap.nbytes if crosses else 0))
    aside.reverse()
    across.reverse()
    best, saved = sum(gap.nbytes for gap in found), 0
    holds: list[bool] = []
    for _ in range(NODES):
        i = len(holds)
        if saved + aside[i] + min(across[i], int(room[narrow])) > best:
            if i < len(order):
                gap = order[i]
                holds.append(not (needs[i] and not holds[-1]) and gap.fits(room))
                if holds[-1]:
                    gap.take(room, gap.nbytes)
                    saved += gap.nbytes
                continue
            best, found = saved, {gap for gap, hold in zip(order, holds, strict=True) if hold}
        while holds and not holds[-1]:
            holds.pop()
        if not holds:
            break
        holds[-1] = False
        gap = order[len(holds) - 1]
        gap.take(room, -gap.nbytes)
        saved -= gap.nbytes
    return found


def _narrowest(gaps: Sequence[Gap], room: NDArray[np.int64]) -> int:
    """The schedule step where the most bytes of gaps do not fit."""
    wanted = np.zeros_like(room)
    for gap in gaps:
        gap.take(wanted, -gap.nbytes)
    return int((wanted - room).argmax())
