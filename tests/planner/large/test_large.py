"""Raw problems with much that is forbidden: propagation, contraction, the first choice, and the search on trees."""

from __future__ import annotations

import itertools
import math
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.solver.raw_problems import raw_problem
from scrimp.errors import FitError, PlanError
from scrimp.planner import Edge, Hold, Node, Problem, evaluate, held_nbytes, solve
from scrimp.planner.large import descent as descent_module
from scrimp.planner.large import masks as masks_module
from scrimp.planner.large import session as large_session
from scrimp.planner.large.arrays import Arrays
from scrimp.planner.large.contract import Contracted, consistent, contract
from scrimp.planner.large.descent import Descent, Penalty
from scrimp.planner.large.forest import Neighbours, best_on
from scrimp.planner.large.masks import Masks
from scrimp.planner.large.rebuild import rebuilt, too_much
from scrimp.planner.large.session import Large
from scrimp.planner.solver import solve as solve_module
from tests.support.planner.problems import every_choice, random_problem

SEEDS = st.integers(0, 10**6)


def _all_allowed(problem: Problem) -> list[tuple[int, ...]]:
    choices = itertools.product(*(range(len(node.options)) for node in problem.nodes))
    return [choice for choice in choices if evaluate(problem, choice).seconds < math.inf]


def _contracted(problem: Problem) -> tuple[Arrays, Contracted]:
    arrays = Arrays(problem)
    left = consistent(arrays, [node.name for node in problem.nodes])
    return arrays, contract(arrays, left)


@given(SEEDS)
def test_propagation_removes_no_option_that_an_allowed_choice_has(seed: int) -> None:
    problem = random_problem(seed, forbid=0.5, nodes=(3, 6))
    allowed = _all_allowed(problem)
    arrays = Arrays(problem)
    masks = Masks(np.isfinite(arrays.unary), arrays.ends, np.isfinite(arrays.pair))
    wiped = masks.propagate(range(arrays.count))
    if wiped is not None:
        assert not allowed
        with pytest.raises(PlanError, match="infeasible problem: every option of node"):
            consistent(arrays, [node.name for node in problem.nodes])
        return
    left = consistent(arrays, [node.name for node in problem.nodes])
    assert np.array_equal(left, masks.left(arrays.width))  # two ways to the same
    for choice in allowed:
        assert left[np.arange(len(choice)), choice].all()


@given(SEEDS)
def test_a_dive_finds_an_allowed_choice_wherever_there_is_one_and_proves_it_if_not(seed: int) -> None:
    problem = random_problem(seed, forbid=0.6, nodes=(3, 6))
    arrays = Arrays(problem)
    masks = Masks(np.isfinite(arrays.unary), arrays.ends, np.isfinite(arrays.pair))
    allowed = _all_allowed(problem)
    if masks.propagate(range(arrays.count)) is not None:
        assert not allowed
        return
    choice, complete = masks.dive([list(range(arrays.width))] * arrays.count, math.inf)
    assert complete == bool(allowed)
    assert (choice is None) == (not allowed)
    if choice is not None:
        assert tuple(choice) in allowed


@given(SEEDS)
def test_contraction_keeps_every_allowed_choice_with_its_bytes_and_seconds(seed: int) -> None:
    problem = _tied(random_problem(seed, forbid=0.3, nodes=(3, 6)), random.Random(seed))
    allowed = _all_allowed(problem)
    try:
        arrays, small = _contracted(problem)
    except PlanError:
        assert not allowed
        return
    for choice in allowed:
        found = small.contracted(np.array(choice))
        assert found is not None
        assert tuple(small.original(found).tolist()) == choice
        assert np.array_equal(small.arrays.profile(found), arrays.profile(np.array(choice)))
        assert small.arrays.held(found) == held_nbytes(problem, choice)
        assert small.arrays.profile(found).max() == evaluate(problem, choice).peak_nbytes
        assert Descent(small.arrays, found).seconds == pytest.approx(evaluate(problem, choice).seconds, rel=1e-5)


def _tied(problem: Problem, rng: random.Random) -> Problem:
    """With edges that allow one option of a node for each of another."""
    edges = list(problem.edges)
    for one, two in itertools.combinations(range(len(problem.nodes)), 2):
        if rng.random() < 0.3:
            images = [rng.randrange(len(problem.nodes[two].options)) for _ in problem.nodes[one].options]
            table = tuple(
                tuple(0.001 if q == image else math.inf for q in range(len(problem.nodes[two].options))) for image in images
            )
            edges.append(Edge(nodes=(one, two), seconds=table))
    return replace(problem, edges=tuple(edges))


def test_followers_are_one_with_their_leader() -> None:
    planted = raw_problem(400, seed=3)
    _, small = _contracted(planted.problem)
    assert small.arrays.count < 0.8 * 400
    assert small.contracted(np.array(planted.choice)) is not None


@given(SEEDS)
def test_trees_have_no_circle_and_take_their_best_options(seed: int) -> None:
    problem = random_problem(seed, forbid=0.2, nodes=(4, 7), options=3)
    arrays = Arrays(problem)
    allowed = _all_allowed(problem)
    if not allowed:
        return
    rng = random.Random(seed)
    start = np.array(rng.choice(allowed))
    forest = Neighbours(arrays).forest(rng, [True] * arrays.count, 4, 3)
    inside = forest.tree >= 0
    joined = inside[arrays.ends].all(axis=1)
    assert joined.sum() == inside.sum() - len(forest.roots)  # as many edges as a forest has
    found = best_on(forest, arrays.unary, arrays.pair, start, np.inf)
    assert np.array_equal(found[~inside], start[~inside])
    same = [c for c in allowed if np.array_equal(np.array(c)[~inside], start[~inside])]
    best = min(evaluate(problem, choice).seconds for choice in same)
    assert evaluate(problem, found.tolist()).seconds == pytest.approx(best, rel=1e-5, abs=1e-12)


def test_a_sweep_within_the_limit_stays_there_and_keeps_its_own_count() -> None:
    planted = raw_problem(600, seed=1)
    _, small = _contracted(planted.problem)
    start = small.contracted(np.array(planted.choice))
    assert start is not None
    descent, limit = Descent(small.arrays, start), float(planted.problem.limit_nbytes or 0)
    before = descent.seconds
    for _ in range(12):
        descent.sweep(Penalty(limit, weight=1e-4 * descent.seconds / small.arrays.points))
        judged = evaluate(planted.problem, small.original(descent.choice).tolist())
        assert judged.peak_nbytes == descent.profile.max() <= limit
        assert descent.seconds == pytest.approx(judged.seconds, rel=1e-5)
    assert descent.seconds < 0.95 * before


@pytest.mark.parametrize("seed", range(4))
def test_what_is_chosen_anew_is_allowed(seed: int) -> None:
    planted = raw_problem(600, seed)
    _, small = _contracted(planted.problem)
    a, start = small.arrays, small.contracted(np.array(planted.choice))
    assert start is not None
    masks = Masks(np.isfinite(a.unary), a.ends, np.isfinite(a.pair))
    masks.propagate(range(a.count))
    a.restrict(masks.left(a.width))
    target, rng, less = 0.9 * float(planted.problem.limit_nbytes or 0), random.Random(seed), 0
    domains = masks.domains.copy()
    for _ in range(20):
        over = too_much(a.profile(start), target)
        found = rebuilt(a, masks, start, a.unary, over, rng, math.inf)
        assert masks.domains == domains
        if found is not None:
            assert evaluate(planted.problem, small.original(found).tolist()).seconds < math.inf
            less += too_much(a.profile(found), target).sum() < over.sum()
    assert less  # dives that take what is cheap happen on what is lean too


def _count_cpu_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search's clock: what other processes do is not its fault."""
    for module in (descent_module, large_session, masks_module, solve_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=time.process_time))


@pytest.mark.parametrize(("seed", "objective"), [(0, "time"), (1, "time"), (0, "memory"), (0, "redundancy")])
def test_planted_problems_are_solved_within_their_limit(seed: int, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_session, "LARGE", 500)
    _count_cpu_seconds(monkeypatch)
    planted = raw_problem(800, seed)
    solution = solve(planted.problem, objective=objective, seconds=3)
    judged = evaluate(planted.problem, solution.choice)
    assert judged.seconds < math.inf
    assert (judged.peak_nbytes, judged.seconds) == (solution.peak_nbytes, solution.seconds)
    assert judged.peak_nbytes <= (planted.problem.limit_nbytes or 0)
    assert solution.solver == large_session.NAME
    assert all(phase.bound <= phase.value for phase in solution.phases)
    theirs = evaluate(planted.problem, planted.choice)
    if objective == "time":
        assert judged.seconds < theirs.seconds
    elif objective == "memory":
        assert judged.peak_nbytes <= theirs.peak_nbytes
    else:
        assert solution.held_nbytes < held_nbytes(planted.problem, planted.choice)


def test_where_small_steps_find_nothing_trees_do() -> None:
    """Below the size of a large problem the linear program is asked, but it has a first choice by then."""
    planted = raw_problem(400, seed=2)
    solution = solve(planted.problem, objective="time", seconds=20, gap=0.5)
    assert evaluate(planted.problem, solution.choice).seconds < math.inf
    assert solution.peak_nbytes <= (planted.problem.limit_nbytes or 0)
    assert solution.solver != large_session.NAME


def test_a_start_is_taken_and_never_made_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_session, "LARGE", 100)
    planted = raw_problem(300, seed=4)
    told: list[float] = []
    solution = solve(
        planted.problem,
        objective="time",
        starts=[planted.choice],
        seconds=1e-3,
        progress=lambda _, value, bound: told.append(value),
    )
    theirs = evaluate(planted.problem, planted.choice)
    assert told[0] == pytest.approx(theirs.seconds, rel=1e-5)
    assert solution.seconds <= theirs.seconds
    assert solution.status == "time limit"


def test_what_cannot_be_met_is_said_honestly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_session, "LARGE", 2)
    planted = raw_problem(300, seed=5)
    with pytest.raises(FitError, match=r"the least peak found is .* \(none is below .*\)"):
        solve(replace(planted.problem, limit_nbytes=1 << 20), objective="time", seconds=2)
    # Two colours do not colour a triangle, and no edge alone shows it; a dive does.
    node = Node(name="n", options=("a", "b"), seconds=(1.0, 1.0), holds=(Hold(first=0, last=0, kind="k", nbytes=(1, 2)),))
    differ = ((math.inf, 0.0), (0.0, math.inf))
    edges = tuple(Edge(nodes=pair, seconds=differ) for pair in ((0, 1), (1, 2), (0, 2)))
    with pytest.raises(PlanError, match="no feasible choice for 3 nodes and 3 edges: every choice has a forbidden pair"):
        solve(Problem(points=1, nodes=(node,) * 3, edges=edges), objective="time", seconds=5)


@settings(max_examples=40)
@given(SEEDS)
def test_small_problems_are_answered_within_their_limits_too(seed: int) -> None:
    """Against all choices there are: never forbidden, never over, never below the bound, and mostly the best."""
    problem = random_problem(seed, forbid=0.3, nodes=(3, 6))
    choices = every_choice(problem)
    if not choices:
        return
    limit = sorted(peak for peak, _, _ in choices)[len(choices) // 2]
    best = min(seconds for peak, _, seconds in choices if peak <= limit)
    found = Large(problem).minimise("seconds", limit=limit, seconds=5, gap=0.0)
    assert found.phase.bound <= best * (1 + 1e-9)
    if found.choice is not None:
        judged = evaluate(problem, found.choice)
        assert judged.peak_nbytes <= limit
        assert best * (1 - 1e-9) <= judged.seconds < math.inf


def test_the_deadline_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_session, "LARGE", 1000)
    _count_cpu_seconds(monkeypatch)
    problem = raw_problem(3000, seed=6).problem
    begin = time.process_time()
    solve(problem, objective="time", seconds=2)
    assert time.process_time() - begin < 2 + 1
