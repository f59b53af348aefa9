"""Reports the search as text, a few times a second: the incumbent and the lower bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from scrimp.ledger import format_nbytes
from scrimp.planner.solver.found import Progress
from scrimp.planner.solver.model import HELD, PEAK

SECONDS_BETWEEN = 0.1  # no faster than one can read

_WHAT = {PEAK: "least peak", HELD: "fewest bytes held"}


def in_words(say: Callable[[str], None], prefix: str = "", *, clock: Callable[[], float] = time.monotonic) -> Progress:
    """A progress callback for `solve`. It always reports the first value of each objective."""
    last: tuple[str, float] = ("", -math.inf)

    def tell(objective: str, value: float, bound: float) -> None:
        nonlocal last
        now = clock()
        if objective == last[0] and now - last[1] < SECONDS_BETWEEN:
            return
        last = objective, now
        found = (
            "nothing found yet" if value == math.inf else f"{_WHAT.get(objective, 'least step')} so far {_size(objective, value)}"
        )
        say(f"{prefix}{found}, none below {_size(objective, bound)}")

    return tell


def _size(objective: str, value: float) -> str:
    return format_nbytes(int(value)) if objective in _WHAT else f"{value:.4g} s"
