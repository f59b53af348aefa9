"""When a search must end. Everything that searches after the capture asks one of these how many seconds are left."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    """`at`: by `time.monotonic()`."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds; 0 where it has passed."""
        return max(self.at - time.monotonic(), 0.0)

    @property
    def passed(self) -> bool:
        return self.left() == 0

    def part(self, share: float) -> Deadline:
        """An earlier one, after this share of the seconds that are left."""
        return Deadline.after(self.left() * share)
