"""Rows only for points that matter, options compared by some numbers first, small steps that stop: the answers stay the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.solver.command import blocks_problem
from scrimp.planner import Hold, Node, Problem, evaluate, solve
from scrimp.planner.solver import backend, lazy_rows, presolve
from scrimp.planner.solver import session as session_module
from scrimp.planner.solver.local_search import improve
from scrimp.planner.solver.model import HELD, PEAK, SECONDS, Model
from scrimp.planner.solver.presolve import Reduced, reduce
from scrimp.planner.solver.session import Session
from tests.support.planner.problems import every_choice, random_problem

UNITS = {PEAK: 1.0, HELD: 1.0, SECONDS: 1e-6}


def _linear(reduced: Reduced, limit: float) -> float:
    """With rows for all points."""
    model = Model(reduced)
    model.restart(UNITS)
    return backend.minimise(model.program(SECONDS, limit, math.inf, math.inf), whole=False, seconds=10).bound


def _few_at_a_time(reduced: Reduced, limit: float) -> tuple[backend.Result, Model]:
    model = Model(reduced, np.arange(0))
    model.restart(UNITS)
    found = lazy_rows.relaxed(model, lambda: model.program(SECONDS, limit, math.inf, math.inf), limit, seconds=10, solver=None)
    return found, model


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_a_linear_program_with_few_rows_comes_to_the_same(seed: int, part: float) -> None:
    problem = random_problem(seed, forbid=0.0, nodes=(3, 7))
    peaks = sorted(peak for peak, _, _ in every_choice(problem))
    limit = peaks[int(part * (len(peaks) - 1))]
    reduced = reduce(problem)
    result, model = _few_at_a_time(reduced, limit)
    assert result.bound == pytest.approx(_linear(reduced, limit), rel=1e-7, abs=1e-6)
    assert result.values is not None
    assert model.profile(result.values).max() <= limit + 1e-5
    assert len(set(model.points.tolist())) == len(model.points) <= len(reduced.floor)


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_solutions_are_the_best_though_rows_are_missing_at_first(seed: int) -> None:
    problem = random_problem(seed, forbid=0.05, nodes=(4, 7))
    choices = every_choice(problem)
    if not choices:
        return
    least = min(peak for peak, _, _ in choices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_module, "improve", lambda reduced, choice, *_: tuple(choice))  # or there would be little to do
        for slack in (0.0, 0.1, 0.5):
            found = solve(problem, slack=slack, gap=0.0)
            best = min(seconds for peak, _, seconds in choices if peak <= math.floor(least * (1 + slack)))
            assert found.peak_nbytes <= least * (1 + slack)
            assert found.seconds == pytest.approx(best, rel=1e-8, abs=1e-15)
            assert found.status == "optimal"


def test_a_limit_far_off_needs_no_rows_and_one_that_binds_needs_few() -> None:
    problem = blocks_problem(12, 8, 6, "each")
    reduced = reduce(problem)
    free, without = _few_at_a_time(reduced, 1e18)
    assert len(without.points) == 0
    assert free.bound == pytest.approx(_linear(reduced, 1e18))
    fastest = evaluate(problem, reduced.original(without.read(free.values)))  # type: ignore[arg-type]
    bound, model = _few_at_a_time(reduced, 0.8 * fastest.peak_nbytes)
    assert 0 < len(model.points) < len(reduced.floor) / 3
    assert bound.bound == pytest.approx(_linear(reduced, 0.8 * fastest.peak_nbytes), rel=1e-7)
    assert bound.bound > free.bound * 1.0001


def test_what_is_known_when_the_time_is_up_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    reduced = reduce(blocks_problem(12, 8, 6, "each"))
    free, without = _few_at_a_time(reduced, 1e18)
    assert free.values is not None
    limit = 0.8 * without.profile(free.values).max()
    times, solver = count(), backend.minimise

    def only_once(*args: object, **named: object) -> backend.Result:
        if next(times):
            return backend.Result(status=backend.STOPPED, values=None, bound=-math.inf)
        return solver(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(lazy_rows, "minimise", only_once)
    result, _ = _few_at_a_time(reduced, limit)
    assert result.status == backend.STOPPED
    assert result.bound == pytest.approx(free.bound)
    assert result.bound < _linear(reduced, limit)


def test_a_solution_that_a_solver_has_over_the_limit_is_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are values that no choice within it has."""
    problem = blocks_problem(6, 8, 6, "each")
    monkeypatch.setattr(session_module, "improve", lambda reduced, choice, *_: tuple(choice))
    quickest = evaluate(problem, solve(problem, objective="time", gap=0.0).choice)
    told: list[float] = []
    session = Session(problem, progress=lambda _, value, bound: told.append(value))
    found = session.minimise(SECONDS, limit=0.9 * quickest.peak_nbytes, seconds=20, gap=0.0)
    assert found.choice is not None
    assert evaluate(problem, found.choice).peak_nbytes <= 0.9 * quickest.peak_nbytes
    assert min(told) >= found.phase.value * (1 - 1e-9)


def test_numbers_are_ones_a_solver_can_work_with_where_there_is_no_room_at_the_peak() -> None:
    """At one point all that is there must be; at others gigabytes are free. In units made for the first, HiGHS took whatever
    it was given to start from for the best."""
    blocks = blocks_problem(6, 8, 6, "each")
    top = 10 * solve(blocks, objective="time").peak_nbytes
    always = Node(name="always", options=("there",), seconds=(0.0,), holds=(Hold(first=0, last=0, kind="k", nbytes=(top,)),))
    only_there = replace(blocks, points=1, nodes=(always,), edges=())
    session = Session(replace(blocks, nodes=(*blocks.nodes, always)))
    limit = int(session.reduced.floor.max())
    assert limit >= evaluate(only_there, (0,)).peak_nbytes == top
    call = session_module._SolverCall(session, SECONDS, limit, math.inf, 20, 0.0)
    session.model.restart(call.units(), np.arange(len(session.reduced.floor)))
    program = call.program()
    assert 1 < np.abs(program.value).max() < 1e5
    found = session.minimise(SECONDS, limit=limit, seconds=20, gap=0.0)
    assert found.phase.status == "optimal"
    assert found.choice is not None
    assert evaluate(session.problem, found.choice).peak_nbytes == limit


def _dominated(problem: Problem) -> Iterator[tuple[int, int]]:
    """Nodes and options that another option of the node beats or equals whatever the rest choose, by trying all of them."""
    seen: dict[tuple[int, tuple[int, ...]], dict[int, tuple[float, ...]]] = {}
    sizes = [len(node.options) for node in problem.nodes]
    for choice in np.ndindex(*sizes):
        found = evaluate(problem, choice)
        for i, p in enumerate(choice):
            seen.setdefault((i, (*choice[:i], *choice[i + 1 :])), {})[p] = (found.peak_nbytes, found.seconds)
    for i, size in enumerate(sizes):
        for p in range(size):
            for q in range(size):
                rows = [by for (node, _), by in seen.items() if node == i]
                if p != q and all(all(a <= b for a, b in zip(by[q], by[p], strict=True)) for by in rows):
                    yield i, p


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([1, 3, 10**6]))
def test_options_go_by_all_their_numbers_however_many_are_compared_first(seed: int, some: int) -> None:
    problem = random_problem(seed, forbid=0.0, nodes=(2, 4))
    plain = reduce(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presolve, "_SOME", some)
        other = reduce(problem)
    assert [each.tolist() for each in other.options] == [each.tolist() for each in plain.options]
    assert [each.tolist() for each in other.instead] == [each.tolist() for each in plain.instead]
    beaten = set(_dominated(problem))
    gone = {(i, p) for i, node in enumerate(problem.nodes) for p in range(len(node.options)) if p not in plain.options[i]}
    # One that went after others had gone may beat what is left alone; the first to go are beaten by all choices.
    assert not gone or gone & beaten


def test_small_steps_stop_at_a_peak_that_none_is_below() -> None:
    problem = blocks_problem(6, 8, 6, "each")
    reduced = reduce(problem)
    start = tuple(int(node.seconds.argmin()) for node in reduced.nodes)
    whole = improve(reduced, start, PEAK, math.inf, math.inf, math.inf)
    first, last = (float(reduced.profile(choice).max()) for choice in (start, whole))
    soon = improve(reduced, start, PEAK, math.inf, math.inf, math.inf, least=(first + last) / 2)
    assert last < reduced.profile(soon).max() <= (first + last) / 2
