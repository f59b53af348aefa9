"""Sums the seconds that a thread spends inside a block; other threads may read the sum meanwhile."""

from __future__ import annotations

import time


class Stopwatch:
    """`with watch:` in one thread at a time."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)  # sum so far and start of the block, replaced atomically

    def __enter__(self) -> None:
        self._state = (self._state[0], time.perf_counter())

    def __exit__(self, *_: object) -> None:
        self._state = (self.seconds, None)

    @property
    def seconds(self) -> float:
        """The sum, including the block that is running."""
        before, since = self._state
        return before if since is None else before + time.perf_counter() - since
