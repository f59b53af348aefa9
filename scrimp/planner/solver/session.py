"""One objective at a time: a first choice by small steps, the linear program for a bound, and branch and bound if they differ.

Every choice is judged by `evaluate` on the problem as it was given. A solver's solution that is over a limit (by less than its
tolerance) is no solution: it is forbidden and the solver asked again.
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

_NONE = 1e-6  # of an option, what is no part
_RELAX = 0.7  # the part of the time that the linear program may take
_TURNS = 4  # how often each node and link of a large problem has its turn, for the least peak
_SEARCH = 0.15  # the part of the time that small steps may take
_HELP = 0.25  # the part of the time for a search on trees, where small steps find nothing
_MANY = 100  # nodes, from which on there may be that search


class Session:
    """A problem made small once, for several questions. Choices are those of the whole problem."""

    first_part = 0.6  # of the time, for a first choice within a limit: with the rest the least peak says whether there is one

    def __init__(self, problem: Problem, solver: str | None = None, progress: Progress | None = None) -> None:
        self.problem, self.solver, self.progress = problem, solver or solver_name(), progress
        self.reduced = reduce(problem)
        self.large: Large | None = None  # for problems with much that is forbidden, when it is needed
        self.known: list[tuple[int, ...]] = []  # good choices of the free nodes, for one question or another

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
        """A choice of the whole problem that may be a good start."""
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
        # Not for long: the linear program is a better guide, and may be quicker.
        start = tuple(int(node.seconds.argmin()) for node in reduced.nodes)
        self.search(self.best or start, WORK // 10)
        turns = min(_TURNS * turn_work(reduced), WORK)
        if self.objective == PEAK and turns > WORK // 10 and not self.close_enough(EQUAL):
            self.search(self.best or start, turns, stop=True)  # of a large problem's peak it is by far the slower
        if self.best is None and len(reduced.nodes) >= _MANY and Arrays.fits(self.session.problem):
            self.help(_HELP)
        if self.close_enough(EQUAL):
            return self.found(proven=True)
        if self.best is not None and time.monotonic() > self.deadline:
            return self.found(proven=True)  # to draw up the linear program may take long
        # Any point can be the peak. A limit is reached at few points, and those come to light (`solver/lazy_rows.py`).
        self.session.model.restart(self.units(), np.arange(len(reduced.floor) if self.objective == PEAK else 0))
        return self.found(proven=not self.relax() or self.branch())

    def units(self) -> dict[str, float]:
        """Those in which what is asked for is some 1,000; where nothing is known of it, the most that there can be. Bytes are
        whole: a finer unit would only make numbers that a solver cannot work with. So would one made for the point with the
        least room: there may be none at all, and gigabytes elsewhere."""
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
        """The better of what is known and this, if this fits."""
        if self.session.fits(choice, self.limit, self.held_limit):
            value = self.session.value(choice, self.objective)
            if value < self.value:
                self.best, self.value = choice, value
                self.session.known.append(choice)
                self.tell()

    def search(self, choice: tuple[int, ...], work: int = WORK, *, stop: bool = False) -> None:
        """`stop`: at a peak that none is below, whatever its seconds."""
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
        """By the search on trees, for a part of the time that is left."""
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
        """From a solver, in its units; rounded the safe way, and for bytes up to the next whole one."""
        bound *= self.session.model.units[self.objective]
        if not math.isfinite(bound):
            return
        bound *= 1 - MARGIN
        if self.objective != SECONDS:
            bound = math.ceil(bound - 1e-3)
        self.bound = max(self.bound, bound)

    def relax(self) -> bool:
        """The linear program; False if not even that has a solution."""
        model = self.session.model
        left = _RELAX * (self.deadline - time.monotonic())
        result = relaxed(model, self.program, self.limit, seconds=left, solver=self.session.solver)
        self.size = (model.columns, model.rows, len(model.value))
        if result.status == INFEASIBLE:
            return self.best is not None
        if result.status != OPTIMAL and self.best is not None:  # then at least as small steps can make it
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
        """Branch and bound over the options of which the linear program takes a part, and those of the best choice. Most nodes
        then have one: it is quick, and where a limit binds it is better than rounding and small steps."""
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
        """Of bytes and seconds the most that a choice may have that is as good as the best one known."""
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
        """Branch and bound until the gap is closed or the time is up; whether, if there is no choice, that is proven."""
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
                value = self.value / unit  # for the solver's may be over the limit where there are no rows
            self.session.progress(self.objective, value * unit, max(bound * unit, self.bound))

    def over(self, choice: tuple[int, ...]) -> bool:
        """Whether a solver's choice is over a limit after all, or at a point that had no row; it will not come back."""
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
