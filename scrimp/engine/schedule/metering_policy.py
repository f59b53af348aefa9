"""Decides which steps the CPU meter measures. It costs time there, because it intercepts every operator.

After several steps in a row that follow one schedule and take no more memory than the first of them at any schedule step, only
one step in sixteen is metered. All are metered again once one of them takes more. If somebody resets the ledger's peak, the next
step is metered. A metered step is recorded: `recorded` is the last one that was completed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scrimp.chunks import Choice, CudaMeter, Meter, ScheduleStep
from scrimp.ledger import KINDS, Ledger, Recording, Timeline

if TYPE_CHECKING:
    from scrimp.engine.schedule.planned import Planned

ALIKE = 3  # metered steps in a row that take no more
EVERY = 16


@dataclass
class Seen:
    """Metered steps of one plan: the one that took the most, and how many after it took no more."""

    choice: Choice
    schedule_steps: list[ScheduleStep]
    peak_nbytes: int  # the ledger's, after the last of them
    alike: int = 1
    since: int = 0  # steps that were not metered

    def covers(self, schedule_steps: list[ScheduleStep]) -> bool:
        if [schedule_step.needs for schedule_step in self.schedule_steps] != [
            schedule_step.needs for schedule_step in schedule_steps
        ]:
            return False
        return all(now.room_nbytes <= then.room_nbytes for then, now in zip(self.schedule_steps, schedule_steps, strict=True))


class MeteringPolicy:
    """Turns the meter on or off for each step."""

    def __init__(self, meter: Meter, ledger: Ledger) -> None:
        self._meter, self._ledger = meter, ledger
        self.metering = True
        self._recorded: Recording | None = None

    @property
    def recorded(self) -> Timeline | None:
        return None if self._recorded is None else self._recorded.timeline(KINDS)

    def step(self, plan: Planned, number: int) -> AbstractContextManager[object]:
        """Context for the step with this number: the meter, or nothing."""
        seen = plan.seen
        self.metering = (
            isinstance(self._meter, CudaMeter)  # reads the allocator's counters, which costs nothing
            or seen is None
            or seen.choice is not plan.choice
            or seen.alike < ALIKE
            or seen.since >= EVERY - 1
            or self._ledger.peak_nbytes < seen.peak_nbytes
        )
        return self._metered(number) if self.metering else nullcontext()

    @contextmanager
    def _metered(self, number: int) -> Iterator[None]:
        recording = self._ledger.recording = Recording(number)
        try:
            with self._meter:
                yield
        finally:
            self._ledger.recording = None
        self._recorded = recording

    def learn(self, plan: Planned, schedule_steps: list[ScheduleStep], *, traced: bool) -> bool:
        """After a step: returns whether it was traced with the meter on, so that its trace is valid."""
        seen, plan.seen = plan.seen, None
        if plan.choice is None or traced:
            return traced and self.metering  # if it left its schedule unmetered, the next step is metered
        if not self.metering:
            assert seen is not None
            seen.since += 1
            plan.seen = seen
            return False
        plan.seen = Seen(plan.choice, schedule_steps, self._ledger.peak_nbytes)
        if seen is not None and seen.choice is plan.choice and seen.covers(schedule_steps):
            plan.seen = replace(plan.seen, schedule_steps=seen.schedule_steps, alike=seen.alike + 1)
        return False
