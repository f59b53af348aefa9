"""The optimizer settings of every parameter at each step.

Updates overlap with later steps, and a learning rate may change meanwhile. So `Rules` records the settings when a step begins,
and an update reads those of its own step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from scrimp.chunks.tables.optimizers import Optimizer
from scrimp.errors import RunError

KEPT = 1024  # steps; no update is delayed that long


class Rules:
    """Settings by step and parameter."""

    def __init__(self, groups: Sequence[tuple[Optimizer, Sequence[str]]]) -> None:
        self.first = tuple(settings for settings, _ in groups)  # as given
        self._group = {name: k for k, (_, names) in enumerate(groups) for name in names}
        self._steps: dict[int, tuple[Optimizer, ...]] = {}

    def begin(self, step: int, now: tuple[Optimizer, ...]) -> None:
        """Record the settings of `step`."""
        self._steps.pop(step, None)
        self._steps[step] = now
        while len(self._steps) > KEPT:
            del self._steps[next(iter(self._steps))]

    def forget(self) -> None:
        """Clear all records, because the step count changes."""
        self._steps.clear()

    def groups(self, step: int) -> tuple[Optimizer, ...]:
        if not self._steps:
            return self.first
        if step not in self._steps:
            raise RunError(f"the optimizer's settings of step {step} are no longer known; the last {KEPT} steps are kept")
        return self._steps[step]

    def digest(self, step: int) -> int:
        """A hash of the settings, for ranks to compare."""
        return int.from_bytes(hashlib.blake2b(repr(self.groups(step)).encode(), digest_size=7).digest(), "big")

    def of(self, name: str, step: int) -> Optimizer:
        """A parameter's settings in a step."""
        return self.groups(step)[self._group[name]]
