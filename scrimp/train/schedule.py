"""The learning rate as a pure function of the step, so that a resumed run needs no state of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scrimp.errors import RunError
from scrimp.train.config.sections import ScheduleSection
from scrimp.train.model.build import function_of

Factor = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """`lr` times the factor of the step."""

    lr: float
    factor: Factor

    def __call__(self, step: int) -> float:
        return self.lr * self.factor(step)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Rises from 1 / warm_up to 1, then falls to `final` at the last step."""

    kind: str
    warm_up: int
    final: float
    steps: int

    def __call__(self, step: int) -> float:
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        if self.kind == "constant":
            return 1.0
        done = min(1.0, (step - self.warm_up) / max(1, self.steps - 1 - self.warm_up))
        if self.kind == "linear":
            return 1.0 - (1.0 - self.final) * done
        return self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True, kw_only=True)
class Named:
    """A user's function, after the warm-up's rise."""

    name: str
    function: Callable[[int], float]
    warm_up: int

    def __call__(self, step: int) -> float:
        found = self.function(step)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 <= found < float("inf"):
            raise RunError(f"[schedule] {self.name}({step}) returned {found!r}; it must return a factor from 0")
        return float(found) * min(1.0, (step + 1) / max(1, self.warm_up))


def factor_of(schedule: ScheduleSection, steps: int) -> Factor:
    if ":" in schedule.kind:
        return Named(name=schedule.kind, function=function_of(schedule.kind, "of the step"), warm_up=schedule.warm_up)
    return Curve(kind=schedule.kind, warm_up=schedule.warm_up, final=schedule.final, steps=steps)
