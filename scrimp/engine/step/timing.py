"""Measures seconds of compute: of each layer's forward, and of a step's whole forward and backward.

A step's compute is the sum over its schedule steps, each from when its layers are resident to when the next ones are requested.
On a GPU this is device time: it excludes waiting for copies and updates, and includes waiting for the next kernel launch.
Backward includes recomputation, gradient norms and moving gradients to their buffers. Each figure is the best of a few steps,
since the first ones also load kernels and fill caches: steps right after a tracing step, and later ever fewer.
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
    """Best measured seconds of layers and of whole steps."""

    def __init__(self, device: torch.device) -> None:
        self.best: dict[int, float] = {}  # of each layer's forward
        self.whole: tuple[float, float] | None = None  # forward and backward of a step with the shape that was traced last
        self.typical = True  # this step has the shape that was traced last
        self._cuda = device.type == "cuda"
        self._steps = 0  # since the last tracing step
        self._since: tuple[bool, Any] | None = None  # whether in backward, and start time
        self._layers: list[tuple[int, Span]] = []
        self._schedule_steps: list[tuple[bool, Span]] = []

    def begin(self, *, tracing: bool) -> None:
        self._steps = 0 if tracing else self._steps + 1
        self._since, self._layers, self._schedule_steps = None, [], []
        if tracing:
            self.whole = None

    def end(self) -> None:
        """End of a step. A timed step waits for the device here."""
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
        """Stop the clock: layers are about to be fetched or evicted."""
        if self._since is not None:
            backward, start = self._since
            self._schedule_steps.append((backward, (start, self._mark())))
            self._since = None

    def resume(self, *, backward: bool) -> None:
        """Start the clock: the layers are resident. Tracing steps are not timed, because they differ from the following ones."""
        if self.on and self._steps and self.typical:
            self._since = (backward, self._mark())

    @property
    def settled(self) -> bool:
        """Enough steps like this one were timed; the first of them still fills caches."""
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
