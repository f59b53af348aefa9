"""How little memory, how large a batch: searches over trials. When it is late they end with what they know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

NARROWER = 0.85  # the next budget, of the peak that was seen under the last one
CLOSE = 16  # a batch is known to one part in so many


@dataclass(frozen=True, kw_only=True)
class Trial:
    """`peak_nbytes` is None where it did not fit, and `why` says why."""

    budget_nbytes: int
    batch: int
    accumulate: int
    peak_nbytes: int | None
    why: str = ""
    seconds: float = 0.0


def downward(
    attempt: Callable[[int, int], Trial], start_nbytes: int, *, most_accumulate: int, late: Callable[[], bool]
) -> list[Trial]:
    """Budget after budget, each a little less than what the last took; where one does not fit, twice as many micro-batches,
    until there are no more of them to be had. `attempt(budget, accumulate)`. All trials, in their order."""
    budget, accumulate = start_nbytes, 1
    trials: list[Trial] = []
    while not (trials and late()):
        trials.append(attempt(budget, accumulate))
        peak = trials[-1].peak_nbytes
        if peak is not None:
            budget = int(NARROWER * min(peak, budget))
        elif accumulate < most_accumulate:
            accumulate = min(2 * accumulate, most_accumulate)
        else:
            break
    return trials


def least(trials: list[Trial]) -> Trial | None:
    return min(
        (trial for trial in trials if trial.peak_nbytes is not None), key=lambda trial: trial.peak_nbytes or 0, default=None
    )


def largest_batch(fits: Callable[[int], bool], start: int, *, late: Callable[[], bool]) -> int:
    """By doubling (or halving, if not even the start fits), then by bisection; 0 if nothing fits."""
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
        if late():
            return low
    while not low and high > 1:
        half = high // 2
        low, high = (half, high) if fits(half) else (0, half)
    while high - low > max(1, low // CLOSE) and low and not late():
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
