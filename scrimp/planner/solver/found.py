"""The result of one objective, and the progress callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[str, float, float], None]  # the objective, the incumbent's value, and the lower bound

EQUAL = 1e-8  # relative difference below which values are equal
MARGIN = 1e-9  # for sums of floats in another order, and for solver tolerances
IS_OPTIMAL, WITHIN_GAP, TIME_LIMIT = "optimal", "within gap", "time limit"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The result for one objective ("peak", "held", "seconds"): the value reached, and the lower bound within the limits."""

    objective: str
    value: float
    bound: float
    status: str  # "optimal", "within gap", "time limit"
    spent_seconds: float
    variables: int
    rows: int
    entries: int

    @property
    def gap(self) -> float:
        return (self.value - self.bound) / self.value if self.value > self.bound else 0.0


@dataclass(frozen=True, kw_only=True)
class Found:
    """`choice`: None if none exists, or (`proven` is False) none was found in time. `price`: seconds saved by one more byte."""

    choice: tuple[int, ...] | None
    phase: Phase
    price: float
    proven: bool
