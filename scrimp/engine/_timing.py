"""Seconds of each layer's forward: the best of a few steps, since the first ones also load kernels and fill caches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

STEPS = 3  # after a tracing step


class Timing:
    def __init__(self, device: torch.device) -> None:
        self.best: dict[int, float] = {}
        self._cuda = device.type == "cuda"
        self._left = 0
        self._now: dict[int, float] = {}
        self._marks: list[tuple[int, Any, Any]] = []  # CUDA events around forwards, read when they are done

    def begin(self, *, tracing: bool) -> None:
        self._left = STEPS if tracing else self._left - 1
        self._now, self._marks = {}, []

    def end(self) -> None:
        """At the end of a step; the few that are timed wait for the device."""
        if self._marks:
            torch.cuda.current_stream().synchronize()
        for layer, start, end in self._marks:
            self._now[layer] = self._now.get(layer, 0.0) + start.elapsed_time(end) / 1e3
        self._marks = []
        for layer, seconds in self._now.items():
            self.best[layer] = min(seconds, self.best.get(layer, seconds))

    @contextmanager
    def of(self, layer: int) -> Iterator[None]:
        if self._left < 0:
            yield
            return
        start = self._mark()
        yield
        end = self._mark()
        if self._cuda:
            self._marks.append((layer, start, end))
        else:
            self._now[layer] = self._now.get(layer, 0.0) + end - start

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
