"""Defers Ctrl-C while the engine works, until the engine can stop safely.

Python raises KeyboardInterrupt between any two instructions. Inside a step that may be between an allocation and its entry in
the ledger, or before a dispatch mode has left torch's stack. So while the engine works a signal is only recorded. The step
checks for it where the step can be undone: each time a layer is fetched or a gradient arrives. The update has no such point, so
the interrupt comes after it. If no such point comes for some seconds, the next Ctrl-C takes effect at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

HELD = (signal.SIGINT, signal.SIGTERM)
LONGEST_SECONDS = 5.0  # after so long a second signal is not deferred

P = ParamSpec("P")
R = TypeVar("R")


class Interrupts:
    """Context that defers signals with a Python handler; it has no effect outside the main thread."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: tuple[int, FrameType | None] | None = None
        self._since = 0.0
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1 or threading.current_thread() is not threading.main_thread():
            return
        for number in HELD:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def __exit__(self, *_error: object) -> None:
        self._depth -= 1
        if self._depth or not self._handlers:
            return
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            if signal.getsignal(number) == self._note:  # else the model has installed another handler
                signal.signal(number, handler)
        noted, self._noted = self._noted, None
        if noted is not None:
            handlers[noted[0]](*noted)

    def check(self) -> None:
        """Raise a recorded signal. Call this where the work can stop."""
        if self._noted is not None and self._handlers:
            noted, self._noted = self._noted, None
            self._handlers[noted[0]](*noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is None:
            self._noted, self._since = (number, frame), time.monotonic()
        elif time.monotonic() - self._since > LONGEST_SECONDS:
            self._noted = None
            self._handlers[number](number, frame)


class Interruptible(Protocol):
    interrupts: Interrupts


E = TypeVar("E", bound=Interruptible)


def in_one_piece(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Decorates a method: signals take effect only where it calls `check`, and at its end."""

    @wraps(method)
    def held(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.interrupts:
            return method(self, *args, **kwargs)

    return held
