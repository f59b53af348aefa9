"""Which layers to hold from one use to the next, so that the fewest bytes come again.

A gap is the time between two uses of a layer. A layer that is held over its whole gap need not come for the second use; a
layer that leaves in the middle must come as if it had left at once. So each gap is held entirely or not at all. At every
moment, the gaps held there must fit into the room that the moment's own layers leave. The most bytes saved is a packing
problem, and layers differ in size, so no single order of dropping solves it: "farthest next use first" (Belady) is optimal
only for layers of one size.

`most_saved` begins with that order, which is near, and then searches by branch and bound. The search is exact where it ends
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
    """A layer of `nbytes` is used at moment `after` and next at moment `before`; in the next step if that is not later.
    There are `total` moments in a step."""

    layer: int
    nbytes: int
    after: int
    before: int
    total: int

    @cached_property
    def schedule_steps(self) -> tuple[slice, ...]:
        """Those that it spans."""
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
    """Gaps to hold, of the most bytes in all, such that those at each moment are within its room."""
    left = np.array(room, dtype=np.int64)
    free = {gap for gap in gaps if not gap.nbytes or not gap.length}
    possible = [gap for gap in gaps if gap not in free and gap.fits(left)]
    # With layers of one size this is optimal: whichever gap ends first can take the place of any other that is in its way.
    found = set()
    for gap in sorted(possible, key=lambda gap: (gap.before <= gap.after, gap.before, gap.layer)):
        if gap.fits(left):
            gap.take(left, gap.nbytes)
            found.add(gap)
    if len(found) < len(possible):
        found = _searched(possible, np.array(room, dtype=np.int64), found)
    return frozenset(found | free)


def _searched(gaps: Sequence[Gap], room: NDArray[np.int64], found: set[Gap]) -> set[Gap]:
    """`found`, or a better choice if one is met within NODES nodes: large gaps first, each first held and then not."""
    order = sorted(gaps, key=lambda gap: (-gap.nbytes, gap.before <= gap.after, gap.length, gap.layer))
    # Of two gaps of one size, the one inside the other is never the worse to hold.
    needs = [i > 0 and order[i - 1].nbytes == gap.nbytes and order[i - 1].inside(gap) for i, gap in enumerate(order)]
    # What can be saved at most from gap i on: all that do not span the narrowest moment, and of the others its room.
    narrow = _narrowest(order, room)
    crossing = [gap.spans(narrow) for gap in order]
    separate, across = [0], [0]
    for gap, crosses in zip(reversed(order), reversed(crossing), strict=True):
        separate.append(separate[-1] + (0 if crosses else gap.nbytes))
        across.append(across[-1] + (gap.nbytes if crosses else 0))
    separate.reverse()
    across.reverse()
    best, saved = sum(gap.nbytes for gap in found), 0
    holds: list[bool] = []
    for _ in range(NODES):
        i = len(holds)
        if saved + separate[i] + min(across[i], int(room[narrow])) > best:
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
    """The moment where the most bytes of gaps find no room."""
    wanted = np.zeros_like(room)
    for gap in gaps:
        gap.take(wanted, -gap.nbytes)
    return int((wanted - room).argmax())
