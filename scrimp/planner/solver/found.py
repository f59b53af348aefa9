"""What is found for one objective, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[str, float, float], None]  # the objective, the best value so far, and what none can be below

EQUAL = 1e-8  # what is nearer than this, relatively, is equal
MARGIN = 1e-9  # for sums of floats in another order, and for what a solver may err
IS_OPTIMAL, WITHIN_GAP, TIME_LIMIT = "optimal", "within gap", "time limit"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One objective ("peak", "held", "seconds"): the value reached, and what no choice within the limits can be below."""

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
    """`choice`: None if there is none, or (`proven` is False) none was found in time. `price`: seconds a byte more would save."""

    choice: tuple[int, ...] | None
    phase: Phase
    price: float
    proven: bool
