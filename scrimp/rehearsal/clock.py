"""The seconds of a rehearsed step: what happens in it, in order, and the step time that follows if operators and moves have a
queue each.

    operators   | op | op |     | op | op |
    moves            | gather --|     | reduction ... |
                     started    waited for

A move that is not started early keeps both queues busy. An interval between two stamps belongs to what ran in it, and to the
queue of operators. What this rank itself does for a move, which is to pack and to copy, is left out: the predicted seconds of the
move stand for it.

A GPU is kept busy before each pass of a layer until the host has queued the pass, as it would be by earlier passes of a large
model. So the seconds are those of the GPU, without waits for launches. Stamps take time too: passes of layers are measured with
few of them, and operators in a step of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from scrimp.chunks import occupy

PASS, QUEUED, RAN = "pass", "queued", "ran"
PACK, PACKED, ENTER, MOVED, STARTED, WAITED = "pack", "packed", "enter", "moved", "started", "waited"
OTHER = "other"  # of work that is neither an operator nor a move
AHEAD = 1.2  # of the seconds that the host took for the pass in the first step


@dataclass(frozen=True, kw_only=True)
class ComputeTime:
    """Seconds of all calls of one class in a step. `measured_seconds`: None on meta."""

    name: str
    times: int
    predicted_seconds: float
    measured_seconds: float | None


@dataclass(frozen=True)
class Event:
    """`stamp`: None where time is not taken. `seconds`: predicted, of what ran or of a move. `where`: the class of layers and the
    pass; `operators`: the class of operators. `number`: of the move that started, or that is waited for."""

    what: str
    stamp: Any = None
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
    """Collects the events of a step. `device`: where time is measured; on meta it is not. `fine`: whether each operator is
    measured, or passes of layers alone."""

    fine = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[Event] = []
        self._begin: Any = None
        self._moves = 0
        self._host: list[float] = []  # when each pass of this step began
        self._first: list[float] = []  # seconds of the host for each pass of the first step

    def begin(self) -> None:
        """A new step."""
        self._first = self._first or [later - earlier for earlier, later in pairwise((*self._host, time.perf_counter()))]
        self._events, self._moves, self._host = [], 0, []
        self._begin = self._stamp()

    def begins(self, where: str) -> None:
        """A pass of a layer."""
        self._events.append(Event(PASS, self._stamp(), where=where))
        number = len(self._host)
        self._host.append(time.perf_counter())
        if self._device.type == "cuda" and number < len(self._first):
            occupy(self._device, AHEAD * self._first[number])
            self._events.append(Event(QUEUED, self._stamp()))

    def ran(self, seconds: float, where: str, operators: str = OTHER) -> None:
        self._events.append(Event(RAN, self._stamp() if self.fine else None, seconds, where, operators))

    def packs(self) -> None:
        """Before a step of the program that moves something."""
        self._events.append(Event(PACK, self._stamp()))

    def packed(self) -> None:
        """After it."""
        self._events.append(Event(PACKED, self._stamp()))

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
            return None if self._device.type == "meta" else time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def result(self) -> StepTime:
        if self._device.type == "meta":
            return step_time(self._events, None)
        stamps = [self._begin, *(event.stamp for event in self._events if event.stamp is not None)]
        between = iter([self._between(*pair) for pair in pairwise(stamps)])
        return step_time(self._events, [0.0 if event.stamp is None else next(between) for event in self._events])

    def _between(self, one: Any, other: Any) -> float:
        if self._device.type != "cuda":
            return float(other - one)
        other.synchronize()
        return float(one.elapsed_time(other)) / 1e3


@dataclass
class _Row:
    times: int = 0
    predicted: float = 0.0
    measured: float = 0.0


def step_time(events: Sequence[Event], intervals: Sequence[float] | None) -> StepTime:
    """`intervals`: measured, before each event, 0 where time is not taken; None if operators take what is predicted."""
    operators = moves = compute = communication = since = 0.0
    arrivals: dict[int, float] = {}
    layers: dict[str, _Row] = {}
    classes: dict[str, _Row] = {}
    where, packing = "", False
    for k, event in enumerate(events):
        taken = event.seconds if intervals is None else intervals[k]
        if event.what in (PASS, PACK, ENTER, RAN) and not packing:
            operators, compute, since = operators + taken, compute + taken, since + taken
            of = event.where if event.what == RAN else where
            layers.setdefault(of, _Row()).measured += taken
        if event.what == PASS:
            where = event.where
        elif event.what == RAN:
            for row in (layers[event.where], classes.setdefault(event.operators, _Row())):
                row.times, row.predicted = row.times + 1, row.predicted + event.seconds
            classes[event.operators].measured += since
            where, since = event.where, 0.0
        elif event.what in (PACK, PACKED):
            packing = event.what == PACK
        elif event.what == MOVED:
            operators = moves = max(operators, moves) + event.seconds
        elif event.what == STARTED:
            arrivals[event.number] = moves = max(operators, moves) + event.seconds
        elif event.what == WAITED:
            operators = max(operators, arrivals.pop(event.number))
        if event.what in (MOVED, STARTED):
            communication += event.seconds
    step = max(operators, moves)
    return StepTime(
        compute=compute,
        communication=communication,
        overlap=max(0.0, compute + communication - step),
        step=step,
        layers=_times(layers, measured=intervals is not None),
        operators=_times(classes, measured=intervals is not None),
    )


def _times(table: dict[str, _Row], *, measured: bool) -> tuple[ComputeTime, ...]:
    return tuple(
        ComputeTime(
            name=name, times=row.times, predicted_seconds=row.predicted, measured_seconds=row.measured if measured else None
        )
        for name, row in table.items()
        if row.times
    )  # fmt: skip
