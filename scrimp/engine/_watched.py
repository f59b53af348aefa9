"""Which steps the meter looks at, on a machine without a GPU, where it has to look at every operator.

Steps that follow one schedule and took the same in every moment, several times in a row, will take that again: of those that
come then it looks at one in sixteen, and at all again once one of them is different. What the ledger calls the peak is there
already: if somebody resets it, the next step is looked at.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
    """The last step with a plan that was looked at."""

    choice: Choice
    moments: list[Moment]
    peak_nbytes: int  # the ledger's, after it
    alike: int = 1  # steps that took just that, up to this one
    since: int = 0  # steps that nobody looked at


class Watched:
    def __init__(self, meter: CpuMeter | CudaMeter, ledger: Ledger) -> None:
        self._meter, self._ledger = meter, ledger
        self._looking = True

    def step(self, plan: Planned) -> AbstractContextManager[object]:
        """Around a step: the meter, or nothing."""
        seen = plan.seen
        self._looking = (
            isinstance(self._meter, CudaMeter)  # which asks the allocator, and is not in the way
            or seen is None
            or seen.choice is not plan.choice
            or seen.alike < ALIKE
            or seen.since >= EVERY - 1
            or self._ledger.peak_nbytes < seen.peak_nbytes
        )
        return self._meter if self._looking else nullcontext()

    def learn(self, plan: Planned, moments: list[Moment], *, traced: bool) -> bool:
        """After a step: whether it traced, and what it found is true."""
        seen, plan.seen = plan.seen, None
        if plan.choice is None or traced:
            return traced and self._looking  # a step that left its schedule with nobody looking: the next one is looked at
        if not self._looking:
            assert seen is not None
            seen.since += 1
            plan.seen = seen
            return False
        same = seen is not None and seen.choice is plan.choice and seen.moments == moments
        alike = seen.alike + 1 if same and seen is not None else 1
        plan.seen = Seen(plan.choice, moments, self._ledger.peak_nbytes, alike)
        return False
