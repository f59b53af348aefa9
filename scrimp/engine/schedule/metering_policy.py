"""Which steps the meter looks at, on a machine without a GPU, where it has to look at every operator.

Steps that follow one schedule and took no more than the first of them in any moment, several times in a row, will go on so: of
those that come then it looks at one in sixteen, and at all again once one of them takes more. What the ledger calls the peak is
there already: if somebody resets it, the next step is looked at.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scrimp.chunks import Choice, CudaMeter, Meter, ScheduleStep
from scrimp.ledger import Ledger

if TYPE_CHECKING:
    from scrimp.engine.schedule.planning import Planned

ALIKE = 3  # steps in a row
EVERY = 16


@dataclass
class Seen:
    """Steps with a plan that were looked at: the one that took the most, and those after it."""

    choice: Choice
    schedule_steps: list[ScheduleStep]
    peak_nbytes: int  # the ledger's, after the last of them
    alike: int = 1
    since: int = 0  # steps that nobody looked at

    def covers(self, schedule_steps: list[ScheduleStep]) -> bool:
        if [schedule_step.needs for schedule_step in self.schedule_steps] != [
            schedule_step.needs for schedule_step in schedule_steps
        ]:
            return False
        return all(now.room_nbytes <= then.room_nbytes for then, now in zip(self.schedule_steps, schedule_steps, strict=True))


class MeteringPolicy:
    def __init__(self, meter: Meter, ledger: Ledger) -> None:
        self._meter, self._ledger = meter, ledger
        self.metering = True

    def step(self, plan: Planned) -> AbstractContextManager[object]:
        """Around a step: the meter, or nothing."""
        seen = plan.seen
        self.metering = (
            isinstance(self._meter, CudaMeter)  # which asks the allocator, and is not in the way
            or seen is None
            or seen.choice is not plan.choice
            or seen.alike < ALIKE
            or seen.since >= EVERY - 1
            or self._ledger.peak_nbytes < seen.peak_nbytes
        )
        return self._meter if self.metering else nullcontext()

    def learn(self, plan: Planned, schedule_steps: list[ScheduleStep], *, traced: bool) -> bool:
        """After a step: whether it traced, and what it found is true."""
        seen, plan.seen = plan.seen, None
        if plan.choice is None or traced:
            return traced and self.metering  # a step that left its schedule with nobody looking: the next one is looked at
        if not self.metering:
            assert seen is not None
            seen.since += 1
            plan.seen = seen
            return False
        plan.seen = Seen(plan.choice, schedule_steps, self._ledger.peak_nbytes)
        if seen is not None and seen.choice is plan.choice and seen.covers(schedule_steps):
            plan.seen = replace(plan.seen, schedule_steps=seen.schedule_steps, alike=seen.alike + 1)
        return False
