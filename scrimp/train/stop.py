"""Signals while training: the first one is recorded, and the run stops after the step with a checkpoint; a second one ends it."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Context in which a signal is recorded. `number`: of the signal; 0 if none came."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.number = 0
        self._quiet = quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.number = number
        if not self._quiet:
            words = f"{signal.Signals(number).name}: finishing the step, then saving; a second one ends the run without saving"
            os.write(2, f"{words}\n".encode())  # print is not safe in a handler
