"""The seconds of a rehearsed step: what happens in it, in order, and the step time that follows if operators and moves have a
queue each.

    operators   | op | op |     | op | op |
    moves            | gather --|     | reduction ... |
                     started    waited for

A move that is not started early keeps both queues busy. An interval of time between two events belongs to the later one, and to
the queue of operators. What this rank itself does for a move, which is to pack and to copy, is left out: the predicted seconds of
the move stand for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

ENTER, MOVED, STARTED, WAITED, RAN = "enter", "moved", "started", "waited", "ran"
OTHER = "other"  # of work that is neither an operator nor a move


@dataclass(frozen=True, kw_only=True)
class ComputeTime:
    """Seconds of all calls of one class in a step. `measured_seconds`: None on meta."""

    name: str
    times: int
    predicted_seconds: float
    measured_seconds: float | None


@dataclass(frozen=True)
class Event:
    """`seconds`: predicted, of what ran or of a move. `where`: the class of layers and the pass; `operators`: the class of
    operators. `number`: of the move that started, or that is waited for."""

    what: str
    stamp: Any
    seconds: float = 0.0
    where: str = ""
    operators: str = OTHER
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """`compute`: of what ran; `communication`: of all moves; `overlap`: of the moves beside operators; `step`: of both queues."""

    compute: float
    communication: float
    overlap: float
    step: float
    layers: tuple[ComputeTime, ...]
    operators: tuple[ComputeTime, ...]


class Clock:
    """Collects the events of a step. `device`: where time is measured; on meta it is not."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[Event] = []
        self._begin: Any = None
        self._moves = 0

    def begin(self) -> None:
        """A new step."""
        self._events, self._moves = [], 0
        self._begin = self._stamp()

    def ran(self, seconds: float, where: str, operators: str = OTHER) -> None:
        self._events.append(Event(RAN, self._stamp(), seconds, where, operators))

    def enter(self) -> None:
        """Before this rank's own part of a move, or of waiting for one."""
        self._events.append(Event(ENTER, self._stamp()))

    def moved(self, seconds: float) -> None:
        self._events.append(Event(MOVED, self._stamp(), seconds))

    def started(self, seconds: float) -> int:
        """The number of a move that runs beside operators from here on."""
        self._moves += 1
        self._events.append(Event(STARTED, self._stamp(), seconds, number=self._moves))
        return self._moves

    def waited(self, number: int) -> None:
        self._events.append(Event(WAITED, self._stamp(), number=number))

    def _stamp(self) -> Any:
        if self._device.type != "cuda":
            return 0.0 if self._device.type == "meta" else time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def result(self) -> StepTime:
        if self._device.type == "meta":
            return step_time(self._events, None)
        stamps = [self._begin, *(event.stamp for event in self._events)]
        return step_time(self._events, [self._between(*pair) for pair in pairwise(stamps)])

    def _between(self, one: Any, other: Any) -> float:
        if self._device.type != "cuda":
            return float(other - one)
        other.synchronize()
        return float(one.elapsed_time(other)) / 1e3


def step_time(events: Sequence[Event], intervals: Sequence[float] | None) -> StepTime:
    """`intervals`: measured, before each event; None if operators take what is predicted."""
    operators = moves = compute = communication = since = 0.0
    arrivals: dict[int, float] = {}
    layers: dict[str, list[float]] = {}
    classes: dict[str, list[float]] = {}
    for k, event in enumerate(events):
        if event.what in (RAN, ENTER):
            taken = intervals[k] if intervals is not None else event.seconds
            operators, compute, since = operators + taken, compute + taken, since + taken
        else:
            communication += event.seconds
        if event.what == RAN:
            for table, key in ((layers, event.where), (classes, event.operators)):
                row = table.setdefault(key, [0, 0.0, 0.0])
                row[0], row[1], row[2] = row[0] + 1, row[1] + event.seconds, row[2] + since
            since = 0.0
        elif event.what == MOVED:
            operators = moves = max(operators, moves) + event.seconds
        elif event.what == STARTED:
            arrivals[event.number] = moves = max(operators, moves) + event.seconds
        elif event.what == WAITED:
            operators = max(operators, arrivals.pop(event.number))
    step = max(operators, moves)
    return StepTime(
        compute=compute,
        communication=communication,
        overlap=max(0.0, compute + communication - step),
        step=step,
        layers=_times(layers, measured=intervals is not None),
        operators=_times(classes, measured=intervals is not None),
    )


def _times(table: dict[str, list[float]], *, measured: bool) -> tuple[ComputeTime, ...]:
    return tuple(
        ComputeTime(
            name=name, times=int(times), predicted_seconds=predicted, measured_seconds=taken if measured else None
        )
        for name, (times, predicted, taken) in table.items()
    )  # fmt: skip
