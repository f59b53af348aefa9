"""A session on a problem too large for the linear program: tens of thousands of distinct nodes.

    arrays      the problem as arrays, without infeasible options, followers merged with their leaders
    (`large/contract.py`)
    first       a choice without a forbidden pair, by propagation and a dive (`large/masks.py`), repaired on trees if that failed
    within      then, at prices for bytes, one within the limit
    better      then better ones, until the time is up or it stops improving (`large/descent.py`)

It has the interface of `Session`. The bounds are sums over single nodes and edges: weak, but proven.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from scrimp.planner.large.arrays import Arrays
from scrimp.planner.large.contract import consistent, contract
from scrimp.planner.large.descent import FINE, QUICK, Descent, Penalty
from scrimp.planner.large.masks import Masks
from scrimp.planner.large.rebuild import rebuilt, too_much
from scrimp.planner.solver.evaluate import evaluate, held_nbytes
from scrimp.planner.solver.found import EQUAL, IS_OPTIMAL, TIME_LIMIT, WITHIN_GAP, Found, Phase, Progress
from scrimp.planner.solver.model import HELD, PEAK, SECONDS
from scrimp.planner.solver.points import Numbers
from scrimp.planner.solver.problem import Problem

NAME = "search on trees"
LARGE = 10_000  # nodes from which on a problem is solved here
_DIVE = 0.25  # share of the time for the dive
_STEEP = 40.0
_HARD, _SOFT, _HARDER = (
    10.0,
    1e-3,
    1.3,
)  # weight of the penalty over the seconds: for a fast choice, for a good one; its growth
_INSIDE = 0.998  # of the limit: target of the search for a choice within it
_LOWER = 0.99  # of the peak: target of the search for a lower one
_BARRIER, _COOLER, _COOLEST = 0.03, 0.9, 1e-4  # weight of the barrier over the seconds: first, factor per step, last
_SHORT, _LONG, _STUCK = 6, 20, 60  # sweeps
_FEWER, _VAIN = 0.2, 2  # a relative decrease of the excess that is progress; sweeps without it before parts are rebuilt
_REBUILDS, _REBUILDING = 8, 0.3  # number of rebuilds, and seconds for one
_PATIENCE = 40  # sweeps without a lower peak
_BETTER = 1e-5  # relative improvement that counts
_CYCLES = 5  # how often without success the limits are lifted


def is_large(problem: Problem) -> bool:
    return len(problem.nodes) >= LARGE and Arrays.fits(problem)


class Large:
    """Choices that it takes and returns are of the whole problem; inside, of the leaders."""

    first_part = 1.0  # share of the time for a first choice: all of it

    def __init__(self, problem: Problem, progress: Progress | None = None) -> None:
        self.problem, self.solver, self.progress = problem, NAME, progress
        self.known: list[Numbers] = []
        self.dived: Numbers | None = None  # the dive's choice
        self.evaluating = 0.0  # seconds that `evaluate` takes
        with _no_collection():
            whole = Arrays(problem)
            left = consistent(whole, [node.name for node in problem.nodes])
            self.contracted = contract(whole, left)
            self.arrays = self.contracted.arrays
            self.masks = Masks(np.isfinite(self.arrays.unary), self.arrays.ends, np.isfinite(self.arrays.pair))
            # Followers in a cycle may leave their leader without options.
            self.impossible = 0 in self.masks.domains or self.masks.propagate(range(self.arrays.count)) is not None
            if not self.impossible:
                self.arrays.restrict(self.masks.left(self.arrays.width))
                self.descent = Descent(self.arrays, self.arrays.unary.argmin(axis=1))
                self.floor = self._floor()

    def learn(self, choice: Sequence[int]) -> None:
        """Adds a choice of the whole problem as a warm start."""
        found = None if self.impossible else self.contracted.contracted(np.asarray(choice))
        if found is not None:
            self.descent.restart(found)
            if math.isfinite(self.descent.seconds):
                self.known.append(found)

    def minimise(
        self, objective: str, *, limit: float = math.inf, held_limit: float = math.inf, seconds: float, gap: float
    ) -> Found:
        if self.impossible:
            phase = Phase(
                objective=objective, value=math.inf, bound=math.inf, status=IS_OPTIMAL, spent_seconds=0.0, variables=0, rows=0,
                entries=0,
            )  # fmt: skip
            return Found(choice=None, phase=phase, price=0.0, proven=True)
        with _no_collection():
            return _Solve(self, objective, limit, held_limit, seconds, gap).result()

    def first(self, deadline: float) -> Numbers | None:
        """A choice without a forbidden pair and with few bytes. None if there is none, or no time to find one."""
        a, holds = self.arrays, self.arrays.node_holds
        lean = np.zeros(a.unary.shape)
        if len(holds.owners):
            lean[holds.owners] = np.add.reduceat(holds.table * (holds.stop - holds.first)[:, None], holds.begins, axis=0)
        order = np.lexsort((a.unary, np.where(np.isfinite(a.unary), lean, np.inf)), axis=1)
        now = time.monotonic()
        choice, allowed = self.masks.copy().dive(order.tolist(), now + _DIVE * (deadline - now))
        if choice is None:
            self.impossible = True
            return None
        self.descent.restart(np.array(choice))
        most = 10 * float(np.where(np.isfinite(a.unary), a.unary, 0).max(axis=1).sum())
        while not allowed and time.monotonic() < deadline:
            allowed = self.descent.mend(most) == 0
        self.dived = self.descent.choice if allowed else None
        return self.dived

    def _floor(self) -> dict[str, float]:
        """The lower bounds of every objective."""
        a = self.arrays
        nodes, pairs = a.node_holds, a.pair_holds
        allowed = np.isfinite(a.unary)[nodes.owner]
        least = np.where(allowed, nodes.table, np.inf).min(axis=1)
        allowed_pairs = np.isfinite(a.pair[pairs.owner])
        least_pairs = np.where(allowed_pairs, pairs.table, np.inf).min(axis=(1, 2)) if len(pairs.owner) else np.zeros(0)
        change = np.zeros(a.points + 1)
        for holds, each in ((nodes, least), (pairs, least_pairs)):
            change += np.bincount(holds.first, each, a.points + 1) - np.bincount(holds.stop, each, a.points + 1)
        seconds = float(a.unary.min(axis=1).sum()) + float(a.pair.min(axis=(1, 2)).sum(dtype=float))
        return {
            PEAK: float(np.cumsum(change)[:-1].max()),
            HELD: float(least.sum() + least_pairs.sum()),
            SECONDS: seconds * (1 - 1e-6),  # for sums in single precision
        }


class _Solve:
    """The search for one objective. `best`: of the leaders; `value`: in the search's precision, until `evaluate` checks it."""

    def __init__(self, session: Large, objective: str, limit: float, held_limit: float, seconds: float, gap: float) -> None:
        self.session, self.objective, self.limit, self.held_limit, self.gap = session, objective, limit, held_limit, gap
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.descent, self.bound = session.descent, session.floor[objective]
        self.best: Numbers | None = None
        self.value, self.price, self.held_price, self.swept = math.inf, 0.0, 0.0, 0.0

    def result(self) -> Found:
        if self.limit < self.session.floor[PEAK] or self.held_limit < self.session.floor[HELD]:
            return self.found(proven=True)
        start: Numbers | None = None
        least = math.inf
        for choice in self.session.known:
            self.descent.restart(choice)
            if self.over() < least:
                start, least = choice, self.over()
            self.take()
        if self.best is None and start is None:
            start = self.session.first(self.deadline)
        if self.best is not None:
            start = self.best
        if start is None:
            return self.found(proven=self.session.impossible)
        self.descent.be(QUICK)
        self.descent.restart(start)
        if not self.take() and self.best is None and not self.reach():
            self.session.known.append(self.descent.choice.copy())  # the nearest, for an error message
            return self.found(proven=False)
        if not self.close_enough():
            {PEAK: self.lower, HELD: self.improve, SECONDS: self.improve}[self.objective]()
        return self.found(proven=False)

    @property
    def deadline(self) -> float:
        """The end of the search, with time left for three evaluations of the result, and the end of a sweep."""
        return self.end - 3 * self.session.evaluating - self.swept

    def over(self) -> float:
        return max(float(self.descent.profile.max()) - self.limit, 0.0) + max(self.descent.held - self.held_limit, 0.0)

    def take(self) -> bool:
        """Keeps the descent's choice as incumbent if it is within the limits and better."""
        descent = self.descent
        if self.over() > 0 or not math.isfinite(descent.seconds):
            return False
        value = {PEAK: float(descent.profile.max()), HELD: descent.held, SECONDS: descent.seconds}[self.objective]
        if value < self.value:
            self.best, self.value = descent.choice, value
            if self.session.progress is not None:
                self.session.progress(self.objective, value, min(self.bound, value))
            if not self.session.evaluating:
                begin = time.monotonic()
                evaluate(self.session.problem, self.session.contracted.original(descent.choice).tolist())
                self.session.evaluating = time.monotonic() - begin
        return True

    def sweep(self, penalty: Penalty) -> None:
        begin = time.monotonic()
        self.descent.sweep(penalty, self.deadline)
        self.swept = max(time.monotonic() - begin, 0.9 * self.swept)

    def close_enough(self) -> bool:
        return self.best is not None and self.value - self.bound <= self.gap * self.value

    def reach(self, part: float = _HARD, harder: float = _HARDER) -> bool:
        """From a choice over a limit to one within it, at prices that begin with this part of the seconds and grow."""
        descent, held_price, begin, swept = self.descent, self.held_price, part, 0
        target, least, idle = self.limit * _INSIDE, math.inf, 0
        while time.monotonic() < self.deadline and (self.best is None or swept < _STUCK):
            swept += 1
            if swept % _STUCK == 0:  # it is stuck: sweep without limits, then restart the prices
                part, held_price = begin, self.held_price
                for _ in range(_SHORT):
                    self.sweep(Penalty(math.inf, weight=0.0))
            if descent.held > self.held_limit:
                held_price = max(held_price * 2, descent.seconds / max(descent.held, 1.0))
            weight = part * descent.seconds / self.session.arrays.points
            self.sweep(Penalty(target, weight=weight, steep=_STEEP, held_price=held_price))
            if self.take():
                return True
            part *= harder
            idle = 0 if self.over() < (1 - _FEWER) * least else idle + 1
            least = min(self.over(), least)
            if idle >= _VAIN and self.rebuild(Penalty(target, weight=weight, steep=_STEEP, held_price=held_price)):
                idle = 0
                if self.take():
                    return True
        return False

    def rebuild(self, penalty: Penalty) -> bool:
        """Rebuilds parts of the choice where trees leave it over the limit. Returns whether the excess fell."""
        descent, better = self.descent, False
        for _ in range(_REBUILDS):
            if time.monotonic() > self.deadline:
                break
            over = too_much(descent.profile, penalty.target)
            costs = descent.price(penalty.prices(descent.profile), penalty.held_price)
            found = rebuilt(
                self.session.arrays, self.session.masks, descent.choice, costs, over, descent.rng,
                min(self.deadline, time.monotonic() + _REBUILDING),
            )  # fmt: skip
            if found is None:
                continue
            before = descent.choice
            descent.restart(found)
            if too_much(descent.profile, penalty.target).sum() < over.sum():
                better = True
            else:
                descent.restart(before)
        return better

    def lower(self) -> None:
        """Lowers the peak."""
        descent, idle = self.descent, 0
        weight = 10 * descent.seconds / self.session.arrays.points
        while idle < _PATIENCE and time.monotonic() < self.deadline and not self.close_enough():
            before = self.value
            self.sweep(Penalty(self.value * _LOWER, weight=weight, steep=2 * _STEEP))
            weight *= _HARDER if weight < 1e6 * descent.seconds else 1.0
            self.take()
            idle = 0 if self.value < before * (1 - _BETTER) else idle + 1

    def improve(self) -> None:
        """Lowers the seconds, or all held bytes, within the limits. A choice that was rushed within them is a bad start for small
        steps. So the limits are lifted for a while, and come back by prices that grow slowly; then the choice is polished."""
        if self.objective == HELD:
            self.held_price = 1e3 * self.descent.seconds / max(self.descent.held, 1.0)
        limited = self.limit < math.inf or self.held_limit < math.inf
        self.descent.be(FINE if limited else QUICK)
        self.polish(_BARRIER, _SHORT if limited else _LONG)
        vain, free = 0, _LONG
        if limited and self.session.dived is not None:
            self.descent.restart(self.session.dived)
        while limited and vain < _CYCLES and self.goes_on():
            before = self.value
            for _ in range(free):
                if self.goes_on():
                    self.sweep(Penalty(math.inf, weight=0.0, held_price=self.held_price))
                    self.take()
            if self.over() == 0 or self.reach(_SOFT, _HARDER):
                self.polish(_BARRIER, _LONG)
            vain = vain + 1 if self.value > before * (1 - _BETTER) else 0
            free = _SHORT
            if self.best is not None:
                self.descent.restart(self.best)
        if self.objective == SECONDS and self.limit < math.inf and self.best is not None:
            self.descent.restart(self.best)
            weight = _COOLEST * self.descent.seconds / self.session.arrays.points
            self.price = float(Penalty(self.limit, weight=weight).prices(self.descent.profile).sum())

    def polish(self, part: float, sweeps: int) -> None:
        """Improves within the limits, with a barrier that is lowered; until so many sweeps bring no improvement."""
        idle = 0
        while idle < sweeps and self.goes_on():
            before = self.value
            weight = part * self.descent.seconds / self.session.arrays.points
            self.sweep(Penalty(self.limit, weight=weight, held_price=self.held_price, held_limit=self.held_limit))
            self.take()
            part = max(part * _COOLER, _COOLEST)
            idle = 0 if self.value < before * (1 - _BETTER) else idle + 1

    def goes_on(self) -> bool:
        return time.monotonic() < self.deadline and not self.close_enough()

    def found(self, *, proven: bool) -> Found:
        """The result, as `evaluate` counts it."""
        session, value, choice = self.session, math.inf, None
        if self.best is not None:
            choice = tuple(session.contracted.original(self.best).tolist())
            checked = evaluate(session.problem, choice)
            held = held_nbytes(session.problem, choice) if self.held_limit < math.inf or self.objective == HELD else 0
            if checked.peak_nbytes <= self.limit and held <= self.held_limit and checked.seconds < math.inf:
                value = {PEAK: checked.peak_nbytes, HELD: held, SECONDS: checked.seconds}[self.objective]
                session.known.append(self.best)
            else:
                choice = None
        bound = min(self.bound, value)
        gap = (value - bound) / value if 0 < value < math.inf else 0.0 if value == 0 else 1.0
        status = IS_OPTIMAL if gap <= EQUAL else WITHIN_GAP if gap <= self.gap else TIME_LIMIT
        phase = Phase(
            objective=self.objective, value=value, bound=bound, status=status, spent_seconds=time.monotonic() - self.begin,
            variables=0, rows=0, entries=0,
        )  # fmt: skip
        return Found(choice=choice, phase=phase, price=self.price, proven=proven)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disables the cyclic garbage collector: it would scan the millions of objects of a large problem again and again."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
