"""`solve`: finds the optimal choice, with a proven optimality gap.

    memory       minimises the peak z, then the seconds with a peak of at most z (1 + slack)
    time         minimises the seconds within the limit
    redundancy   minimises the sum of all bytes held, each hold counted once, then the seconds with that

It is deterministic as long as no part of the search reaches its time limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scrimp.errors import FitError, PlanError
from scrimp.ledger import format_nbytes
from scrimp.planner.large.session import Large, is_large
from scrimp.planner.solver.evaluate import evaluate, held_nbytes
from scrimp.planner.solver.found import IS_OPTIMAL, TIME_LIMIT, WITHIN_GAP, Found, Phase, Progress
from scrimp.planner.solver.model import HELD, PEAK, SECONDS
from scrimp.planner.solver.problem import Problem
from scrimp.planner.solver.session import Session

MEMORY, TIME, REDUNDANCY = "memory", "time", "redundancy"
Left = Callable[[float], float]  # a share of the remaining seconds
_FIRST = 0.6  # share of the time for the first of two phases


@dataclass(frozen=True, kw_only=True)
class Solution:
    """`choice`: the option of every node, by index. Bytes and seconds come from `evaluate`: the peak, the first point that has
    it, bytes by kind there; `held_nbytes`: of all holds. `phases`: for each objective in turn the value, the lower bound and the
    gap. `seconds_per_byte`: step time saved by one more byte: the dual price of the last linear program."""

    choice: tuple[int, ...]
    peak_nbytes: int
    point: int
    seconds: float
    kinds: tuple[tuple[str, int], ...]
    held_nbytes: int
    phases: tuple[Phase, ...]
    seconds_per_byte: float
    solver: str
    spent_seconds: float

    @property
    def status(self) -> str:
        """The worst of its phases: "optimal", "within gap" or "time limit"."""
        order = (IS_OPTIMAL, WITHIN_GAP, TIME_LIMIT)
        return max((phase.status for phase in self.phases), key=order.index)

    @property
    def gap(self) -> float:
        return max(phase.gap for phase in self.phases)


def solve(
    problem: Problem,
    *,
    objective: str = MEMORY,
    slack: float = 0.0,
    seconds: float = 60.0,
    gap: float = 0.01,
    warm: Sequence[int] | None = None,
    starts: Sequence[Sequence[int]] = (),
    progress: Progress | None = None,
    solver: str | None = None,
) -> Solution:
    """`gap`: stop at this relative optimality gap; 0 proves optimality. `warm`, `starts`: warm starts; the solution is no worse
    than the best of those within the limit. `progress` receives each new value and bound: (objective of the phase, value, bound).
    Raises `FitError` if nothing is within the limit."""
    if objective not in (MEMORY, TIME, REDUNDANCY):
        raise PlanError(f"objective '{objective}': there are '{MEMORY}', '{TIME}' and '{REDUNDANCY}'")
    if not (slack >= 0 and 0 <= gap < 1 and seconds > 0):
        raise PlanError(f"slack {slack}, gap {gap}, seconds {seconds}: slack is 0 or more, gap from 0 to 1, seconds more than 0")
    begin = time.monotonic()
    session = begun(problem, solver, progress)
    for choice in starts if warm is None else (warm, *starts):
        evaluate(problem, choice)  # raises if it is invalid
        session.learn(choice)
    return result(session, objective, problem.limit_nbytes, slack=slack, seconds=seconds, gap=gap, begin=begin)


def begun(problem: Problem, solver: str | None, progress: Progress | None) -> Session | Large:
    """A session by problem size: the linear program of a large problem would not be solved in time, so those use the search on
    trees. A named solver is used whatever the size."""
    return Large(problem, progress) if solver is None and is_large(problem) else Session(problem, solver, progress)


def result(
    session: Session | Large, objective: str, limit_nbytes: int | None, *, slack: float, seconds: float, gap: float, begin: float
) -> Solution:
    """`begin`: the start of the time limit."""
    limit = math.inf if limit_nbytes is None else limit_nbytes

    def left(part: float) -> float:
        return max((begin + seconds - time.monotonic()) * part, 0.05)

    phases: list[Phase] = []
    held = math.inf
    if objective == MEMORY:
        found = session.minimise(PEAK, seconds=left(_FIRST), gap=gap)
        if found.phase.value > limit >= found.phase.bound:
            within = session.minimise(PEAK, limit=limit, seconds=left(_FIRST), gap=gap)
            found = found if within.choice is None else within
        if found.phase.value > limit or found.choice is None:
            raise _no_fit(session, limit, found)
        phases.append(found.phase)
        limit = min(limit, math.floor(found.phase.value * (1 + slack)))
    if objective == REDUNDANCY:
        found = _within(session, HELD, limit, left, gap)
        phases.append(found.phase)
        held = found.phase.value
    found = _within(session, SECONDS, limit, left, gap, held)
    assert found.choice is not None  # else solve has raised
    phases.append(found.phase)
    peak, point, total, kinds = evaluate(session.problem, found.choice)
    return Solution(
        choice=found.choice, peak_nbytes=peak, point=point, seconds=total, kinds=tuple(kinds.items()),
        held_nbytes=held_nbytes(session.problem, found.choice), phases=tuple(phases), seconds_per_byte=found.price,
        solver=session.solver, spent_seconds=time.monotonic() - begin,
    )  # fmt: skip


def _within(session: Session | Large, objective: str, limit: float, left: Left, gap: float, held: float = math.inf) -> Found:
    """The best choice within a limit; if none exists, or none was found, minimises the peak to tell which."""
    found = session.minimise(
        objective, limit=limit, held_limit=held, seconds=left(1.0 if session.known else session.first_part), gap=gap
    )
    if found.choice is None:
        # The least peak proves that nothing fits, or turns out to fit.
        least = session.minimise(PEAK, seconds=left(_FIRST), gap=gap if found.proven else 0.0)
        if least.choice is None or least.phase.value > limit:
            raise _no_fit(session, limit, least)
        found = session.minimise(objective, limit=limit, held_limit=held, seconds=left(1.0), gap=gap)
    return found


def _no_fit(session: Session | Large, limit: float, least: Found) -> FitError | PlanError:
    problem = session.problem
    if least.choice is None:
        why = "every choice has a forbidden pair" if least.proven else "no choice without a forbidden pair was found in time"
        return PlanError(f"no feasible choice for {len(problem.nodes)} nodes and {len(problem.edges)} edges: {why}")
    peak, point, _, kinds = evaluate(problem, least.choice)
    proof = "" if least.phase.status == IS_OPTIMAL else f" (none is below {_size(least.phase.bound)})"
    there = ", ".join(f"{kind} {_size(nbytes)}" for kind, nbytes in kinds.items())
    place = problem.where[point] if problem.where else f"point {point} of {problem.points}"
    return FitError(
        f"the least peak found is {_size(peak)}{proof}, at {place}, the limit is {_size(limit)}: "
        f"{_size(peak - limit)} too little. Held there: {there}. "
        f"Use a limit of {peak} bytes or more, more devices, or a smaller batch",
        least_nbytes=peak,
    )


def _size(nbytes: float) -> str:
    return format_nbytes(int(nbytes))
