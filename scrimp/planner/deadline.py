"""The end of the time limit: every search after capture asks a `Deadline` how many seconds are left."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """`at`: as `time.monotonic()` counts."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Remaining seconds; 0 once it has passed."""
        return max(self.at - time.monotonic(), 0.0)

    @property
    def passed(self) -> bool:
        return self.left() == 0

    def part(self, share: float) -> Deadline:
        """An earlier deadline, after this share of the remaining seconds."""
        return Deadline.after(self.left() * share)
