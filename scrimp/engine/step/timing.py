"""Seconds of compute: of each layer's forward, and of a step's whole forward and backward.

A step's compute is the sum of its moments, each from when its layers were there to when the next ones were asked for: the
device's own time where there is one, what its stream waits for copies and updates left out, what it waits for the next
kernel to be launched left in. Backward has its recomputation, and the norms and landing of gradients, in it. Each is the
best of a few steps, since the first ones also load kernels and fill caches: of those after a tracing step, and later of
ever fewer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

STEPS = 3  # right after a tracing step

Span = tuple[Any, Any]


class Timing:
    def __init__(self, device: torch.device) -> None:
        self.best: dict[int, float] = {}  # of each layer's forward
        self.whole: tuple[float, float] | None = None  # forward and backward of a step, of the shape that was traced last
        self.typical = True  # this step is like the one that was traced last
        self._cuda = device.type == "cuda"
        self._steps = 0  # since the last tracing step
        self._since: tuple[bool, Any] | None = None  # whether backward, and since when
        self._layers: list[tuple[int, Span]] = []
        self._schedule_steps: list[tuple[bool, Span]] = []

    def begin(self, *, tracing: bool) -> None:
        self._steps = 0 if tracing else self._steps + 1
        self._since, self._layers, self._schedule_steps = None, [], []
        if tracing:
            self.whole = None

    def end(self) -> None:
        """At the end of a step; the few that are timed wait for the device."""
        if self._cuda and (self._layers or self._schedule_steps):
            torch.cuda.current_stream().synchronize()
        now: dict[int, float] = {}
        for layer, span in self._layers:
            now[layer] = now.get(layer, 0.0) + self._seconds(span)
        for layer, seconds in now.items():
            self.best[layer] = min(seconds, self.best.get(layer, seconds))
        if self._schedule_steps:
            halves = [0.0, 0.0]
            for backward, span in self._schedule_steps:
                halves[backward] += self._seconds(span)
            self.whole = min(self.whole or (halves[0], halves[1]), (halves[0], halves[1]), key=sum)
        self._layers, self._schedule_steps = [], []

    @contextmanager
    def of(self, layer: int) -> Iterator[None]:
        if not self.on:
            yield
            return
        start = self._mark()
        yield
        self._layers.append((layer, (start, self._mark())))

    def pause(self) -> None:
        """Layers are about to come and go."""
        if self._since is not None:
            backward, start = self._since
            self._schedule_steps.append((backward, (start, self._mark())))
            self._since = None

    def resume(self, *, backward: bool) -> None:
        """They are there. A step that traces is not like those that follow, and is left out."""
        if self.on and self._steps and self.typical:
            self._since = (backward, self._mark())

    @property
    def settled(self) -> bool:
        """Enough steps like this one were timed: the first of them still fills caches."""
        return self._steps > 1

    @property
    def on(self) -> bool:
        return self._steps <= STEPS or self._steps & (self._steps - 1) == 0

    def _seconds(self, span: Span) -> float:
        start, end = span
        return float(start.elapsed_time(end)) / 1e3 if self._cuda else float(end - start)

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
