"""Which steps the meter looks at, on a machine without a GPU, where it has to look at every operator.

Steps that follow one schedule and took no more than the first of them in any moment, several times in a row, will go on so: of
those that come then it looks at one in sixteen, and at all again once one of them takes more. What the ledger calls the peak is
there already: if somebody resets it, the next step is looked at.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scrimp.chunks._classes import Choice
from scrimp.chunks._cuda_meter import CudaMeter
from scrimp.chunks._meter import CpuMeter
from scrimp.chunks._residency import Moment
from scrimp.ledger import Ledger

if TYPE_CHECKING:
    from scrimp.engine._planning import Planned

ALIKE = 3  # steps in a row
EVERY = 16


@dataclass
class Seen:
    """Steps with a plan that were looked at: the one that took the most, and those after it."""

    choice: Choice
    moments: list[Moment]
    peak_nbytes: int  # the ledger's, after the last of them
    alike: int = 1
    since: int = 0  # steps that nobody looked at

    def covers(self, moments: list[Moment]) -> bool:
        if [moment.needs for moment in self.moments] != [moment.needs for moment in moments]:
            return False
        return all(now.room_nbytes <= then.room_nbytes for then, now in zip(self.moments, moments, strict=True))


class Watched:
    def __init__(self, meter: CpuMeter | CudaMeter, ledger: Ledger) -> None:
        self._meter, self._ledger = meter, ledger
        self.looking = True

    def step(self, plan: Planned) -> AbstractContextManager[object]:
        """Around a step: the meter, or nothing."""
        seen = plan.seen
        self.looking = (
            isinstance(self._meter, CudaMeter)  # which asks the allocator, and is not in the way
            or seen is None
            or seen.choice is not plan.choice
            or seen.alike < ALIKE
            or seen.since >= EVERY - 1
            or self._ledger.peak_nbytes < seen.peak_nbytes
        )
        return self._meter if self.looking else nullcontext()

    def learn(self, plan: Planned, moments: list[Moment], *, traced: bool) -> bool:
        """After a step: whether it traced, and what it found is true."""
        seen, plan.seen = plan.seen, None
        if plan.choice is None or traced:
            return traced and self.looking  # a step that left its schedule with nobody looking: the next one is looked at
        if not self.looking:
            assert seen is not None
            seen.since += 1
            plan.seen = seen
            return False
        plan.seen = Seen(plan.choice, moments, self._ledger.peak_nbytes)
        if seen is not None and seen.choice is plan.choice and seen.covers(moments):
            plan.seen = replace(plan.seen, moments=seen.moments, alike=seen.alike + 1)
        return False
