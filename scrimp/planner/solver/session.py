"""Solves one objective at a time: local search for an incumbent, the linear program for a bound, branch and bound for the gap.

`evaluate` checks every choice on the problem as given. A solver may return a solution that exceeds a limit by less than its
tolerance: the session forbids it and calls the solver again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from scrimp.planner.large.arrays import Arrays
from scrimp.planner.large.session import Large
from scrimp.planner.solver.backend import INFEASIBLE, OPTIMAL, minimise, solver_name
from scrimp.planner.solver.evaluate import evaluate, held_nbytes
from scrimp.planner.solver.found import EQUAL, IS_OPTIMAL, MARGIN, TIME_LIMIT, WITHIN_GAP, Found, Phase, Progress
from scrimp.planner.solver.lazy_rows import give_rows, relaxed
from scrimp.planner.solver.local_search import WORK, improve, turn_work
from scrimp.planner.solver.model import HELD, PEAK, SCALE, SECONDS, Model, Program
from scrimp.planner.solver.points import Numbers
from scrimp.planner.solver.presolve import reduce
from scrimp.planner.solver.problem import Problem

_NONE = 1e-6  # values below this count as 0
_RELAX = 0.7  # share of the time for the linear program
_TURNS = 4  # how often local search visits each node and link of a large problem, for the least peak
_SEARCH = 0.15  # share of the time for local search
_HELP = 0.25  # share of the time for the search on trees, where local search finds nothing
_MANY = 100  # nodes above which the search on trees may run


class Session:
    """A problem presolved once, for several solver calls. Choices are those of the whole problem."""

    first_part = 0.6  # share of the time for a first choice within a limit; the rest is for the least peak, a proof of fit

    def __init__(self, problem: Problem, solver: str | None = None, progress: Progress | None = None) -> None:
        self.problem, self.solver, self.progress = problem, solver or solver_name(), progress
        self.reduced = reduce(problem)
        self.large: Large | None = None  # for problems with many forbidden pairs, built when it is needed
        self.known: list[tuple[int, ...]] = []  # good choices of the free nodes, from earlier solver calls

    @cached_property
    def model(self) -> Model:
        return Model(self.reduced, np.arange(0))

    def value(self, choice: tuple[int, ...], objective: str) -> float:
        whole = self.reduced.original(choice)
        if objective == HELD:
            return held_nbytes(self.problem, whole)
        found = evaluate(self.problem, whole)
        return found.peak_nbytes if objective == PEAK else found.seconds

    def fits(self, choice: tuple[int, ...], limit: float, held_limit: float) -> bool:
        whole = self.reduced.original(choice)
        peak, _, seconds, _ = evaluate(self.problem, whole)
        return peak <= limit and seconds < math.inf and (held_limit == math.inf or held_nbytes(self.problem, whole) <= held_limit)

    def learn(self, choice: Sequence[int]) -> None:
        """Adds a choice of the whole problem as a warm start."""
        reduced = self.reduced.reduced(choice)
        if reduced is not None:
            self.known.append(reduced)

    def minimise(
        self, objective: str, *, limit: float = math.inf, held_limit: float = math.inf, seconds: float, gap: float
    ) -> Found:
        return _SolverCall(self, objective, limit, held_limit, seconds, gap).result()


class _SolverCall:
    def __init__(self, session: Session, objective: str, limit: float, held_limit: float, seconds: float, gap: float) -> None:
        self.session, self.objective, self.limit, self.held_limit, self.gap = session, objective, limit, held_limit, gap
        self.begin = time.monotonic()
        self.deadline = self.begin + seconds
        self.search_deadline = self.begin + seconds * _SEARCH
        reduced = session.reduced
        self.bound: float = {PEAK: int(reduced.floor.max()), HELD: reduced.held}.get(objective, reduced.seconds * (1 - MARGIN))
        self.best: tuple[int, ...] | None = None
        self.value = math.inf
        self.price = 0.0
        self.size = (0, 0, 0)

    def result(self) -> Found:
        reduced = self.session.reduced
        if self.limit < reduced.floor.max() or self.held_limit < reduced.held:
            return self.found(proven=True)
        for choice in list(self.session.known):
            self.take(choice)
        # Kept short: the linear program guides better, and may be faster.
        start = tuple(int(node.seconds.argmin()) for node in reduced.nodes)
        self.search(self.best or start, WORK // 10)
        turns = min(_TURNS * turn_work(reduced), WORK)
        if self.objective == PEAK and turns > WORK // 10 and not self.close_enough(EQUAL):
            self.search(self.best or start, turns, stop=True)  # for the peak of a large problem the LP is by far slower
        if self.best is None and len(reduced.nodes) >= _MANY and Arrays.fits(self.session.problem):
            self.help(_HELP)
        if self.close_enough(EQUAL):
            return self.found(proven=True)
        if self.best is not None and time.monotonic() > self.deadline:
            return self.found(proven=True)  # building the linear program may take long
        # Any point can be the peak. A limit binds at few points, and lazy rows find them (`solver/lazy_rows.py`).
        self.session.model.restart(self.units(), np.arange(len(reduced.floor) if self.objective == PEAK else 0))
        return self.found(proven=not self.relax() or self.branch())

    def units(self) -> dict[str, float]:
        """Units in which the objective is about 1,000; without an incumbent, its maximum. Bytes are whole, so a finer unit would
        only make badly scaled numbers. So would a unit made for the point with the least room: that may be zero there, and
        gigabytes elsewhere."""
        reduced, caps = self.session.reduced, self.caps()
        parts = [*reduced.nodes, *(link.costs for link in reduced.links)]
        above = np.zeros(len(reduced.floor))
        for costs in parts:
            for first, last, table in costs.spans:
                above[first : last + 1] += table.max()
        most = {
            HELD: sum(int(costs.held.max()) for costs in parts),
            SECONDS: sum(float(costs.seconds[np.isfinite(costs.seconds)].max()) for costs in parts),
        }
        least = {HELD: reduced.held, SECONDS: 0.0}
        ranges = {name: most[name] if caps[name] == math.inf else caps[name] - least[name] for name in most}
        ranges[PEAK] = float(np.minimum(caps[PEAK] - reduced.floor, above).max())
        return {name: (each or 1.0) / SCALE if name == SECONDS else max(each / SCALE, 1.0) for name, each in ranges.items()}

    def found(self, *, proven: bool) -> Found:
        value = self.value if self.best is not None else math.inf
        bound = min(self.bound, value)
        status = IS_OPTIMAL if self.close_enough(EQUAL) else WITHIN_GAP if self.close_enough(self.gap) else TIME_LIMIT
        variables, rows, entries = self.size
        phase = Phase(
            objective=self.objective, value=value, bound=bound, status=status, spent_seconds=time.monotonic() - self.begin,
            variables=variables, rows=rows, entries=entries,
        )  # fmt: skip
        choice = None if self.best is None else self.session.reduced.original(self.best)
        return Found(choice=choice, phase=phase, price=self.price, proven=proven)

    def take(self, choice: tuple[int, ...]) -> None:
        """Keeps the choice as incumbent if it is within the limits and better."""
        if self.session.fits(choice, self.limit, self.held_limit):
            value = self.session.value(choice, self.objective)
            if value < self.value:
                self.best, self.value = choice, value
                self.session.known.append(choice)
                self.tell()

    def search(self, choice: tuple[int, ...], work: int = WORK, *, stop: bool = False) -> None:
        """Local search. `stop`: at a peak equal to the lower bound, whatever its seconds."""
        targets = (max(self.bound, 0), self.limit) if self.objective == PEAK else (self.limit,)
        least = self.bound if stop else -math.inf
        for target in targets:
            choice = improve(
                self.session.reduced, choice, self.objective, target, self.held_limit, self.search_deadline, work, least
            )
            self.take(choice)
            if stop and self.close_enough(EQUAL):
                break

    def help(self, part: float) -> None:
        """Runs the search on trees for a share of the remaining time."""
        session, left = self.session, (self.deadline - time.monotonic()) * part
        if session.large is None:
            session.large = Large(session.problem)
        if self.best is not None:
            session.large.learn(session.reduced.original(self.best))
        found = session.large.minimise(self.objective, limit=self.limit, held_limit=self.held_limit, seconds=left, gap=self.gap)
        choice = None if found.choice is None else session.reduced.reduced(found.choice)
        if choice is not None:
            self.take(choice)

    def tell(self) -> None:
        if self.session.progress is not None:
            self.session.progress(self.objective, self.value, self.bound)

    def close_enough(self, gap: float) -> bool:
        return self.best is not None and self.value - self.bound <= max(gap, EQUAL) * self.value

    def raise_bound(self, bound: float) -> None:
        """Raises the bound to a solver's, given in its units; rounded down safely, and for bytes up to the next whole one."""
        bound *= self.session.model.units[self.objective]
        if not math.isfinite(bound):
            return
        bound *= 1 - MARGIN
        if self.objective != SECONDS:
            bound = math.ceil(bound - 1e-3)
        self.bound = max(self.bound, bound)

    def relax(self) -> bool:
        """Solves the linear program; False if it is infeasible."""
        model = self.session.model
        left = _RELAX * (self.deadline - time.monotonic())
        result = relaxed(model, self.program, self.limit, seconds=left, solver=self.session.solver)
        self.size = (model.columns, model.rows, len(model.value))
        if result.status == INFEASIBLE:
            return self.best is not None
        if result.status != OPTIMAL and self.best is not None:  # improve the incumbent by local search instead
            if self.session.large is not None:
                self.help(1.0)
            self.search_deadline = self.deadline
            self.search(self.best)
        if result.values is not None and result.reduced is not None and math.isfinite(result.bound):
            self.raise_bound(result.bound)
            if self.objective == SECONDS:
                columns, per = [model.peak, model.held], [model.units[PEAK], model.units[HELD]]
                self.price = max(0.0, -float((result.reduced[columns] / per).sum())) * model.units[SECONDS]
            choice = model.read(result.values)
            self.take(choice)
            if not self.close_enough(EQUAL):
                self.search_deadline = time.monotonic() + _SEARCH * max(self.deadline - time.monotonic(), 0)
                self.search(choice)
                self.choose_among(result.values)
            self.tell()
        return True

    def choose_among(self, values: Numbers) -> None:
        """Branch and bound over the options with a nonzero value in the linear program, and those of the incumbent. Most nodes
        then have one option: it is fast, and where a limit binds it beats rounding and local search."""
        if self.best is None or self.close_enough(self.gap):
            return
        model, left = self.session.model, _SEARCH * max(self.deadline - time.monotonic(), 0)
        until, some = time.monotonic() + left, values[: model.binaries] >= _NONE
        while True:
            start, program = model.write(self.best), self.program()
            upper = program.upper.copy()
            upper[: model.binaries] *= some | (start[: model.binaries] >= _NONE)
            result = minimise(
                replace(program, upper=upper), whole=True, seconds=until - time.monotonic(), gap=self.gap / 4, start=start,
                solver=self.session.solver,
            )  # fmt: skip
            if result.values is None:
                return
            self.take(choice := model.read(result.values))
            if time.monotonic() > until or not self.over(choice):
                break
        self.search_deadline = time.monotonic() + left
        self.search(choice)

    def caps(self) -> dict[str, float]:
        """Upper limits of bytes and seconds for a choice as good as the incumbent."""
        caps = {PEAK: self.limit, HELD: self.held_limit, SECONDS: math.inf}
        if self.best is not None:
            caps[self.objective] = min(
                caps[self.objective], self.value * (1 + MARGIN) if self.objective == SECONDS else self.value
            )
        return caps

    def program(self) -> Program:
        caps = self.caps()
        least = self.bound if self.objective == PEAK else 0
        return self.session.model.program(self.objective, caps[PEAK], caps[HELD], caps[SECONDS], least)

    def branch(self) -> bool:
        """Branch and bound until the gap is closed or the time is up; returns whether, without a choice, infeasibility is
        proven."""
        model = self.session.model
        while not self.close_enough(self.gap):
            left = self.deadline - time.monotonic()
            if left <= 0:
                return False
            start = None if self.best is None else model.write(self.best)
            result = minimise(
                self.program(), whole=True, seconds=left, gap=self.gap, start=start, watch=self.watch, solver=self.session.solver
            )
            if result.status == INFEASIBLE:
                return True
            self.raise_bound(result.bound)
            if result.values is None:
                return False
            choice = model.read(result.values)
            self.take(choice)
            if self.over(choice):
                continue
            self.tell()
            return result.status == OPTIMAL
        return True

    def watch(self, value: float, bound: float) -> None:
        if self.session.progress is not None:
            unit, reduced = self.session.model.units[self.objective], self.session.reduced
            if self.limit < math.inf and len(self.session.model.points) < len(reduced.floor):
                value = self.value / unit  # the solver's own may exceed the limit at points without rows
            self.session.progress(self.objective, value * unit, max(bound * unit, self.bound))

    def over(self, choice: tuple[int, ...]) -> bool:
        """Whether a solver's choice exceeds a limit, by less than the tolerance or at a point without a row; a new row then
        excludes it."""
        model, profile = self.session.model, self.session.reduced.profile(choice)
        if give_rows(model, profile, self.limit):
            return True
        if profile.max() > self.limit:
            model.forbid(choice, int(np.argmax(profile)))
        elif self.session.value(choice, HELD) > self.held_limit:
            model.forbid(choice, None)
        else:
            return False
        return True
