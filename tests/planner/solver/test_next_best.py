"""The price of a choice: as trying every choice says; and words on a search, and names of moments."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from scrimp.errors import FitError, PlanError
from scrimp.planner import Hold, Node, Problem, evaluate, solve
from scrimp.planner.solver.next_best import Forbidden, held_at, next_best
from scrimp.planner.solver.progress import SECONDS_BETWEEN, in_words
from scrimp.planner.solver.session import Session, _SolverCall
from tests.support.planner.problems import naive, random_problem


def best_of_all(problem: Problem, forbidden: Forbidden, objective: str) -> tuple[int, float] | None:
    """By trying every choice, with nothing of what is tested."""
    found = []
    for choice in itertools.product(*(range(len(node.options)) for node in problem.nodes)):
        peak, _, seconds = naive(problem, choice)
        out = any(choice[k] in options for k, options in forbidden.options.items())
        out |= any((choice[a], choice[b]) in pairs for (a, b), pairs in forbidden.pairs.items())
        if seconds < math.inf and not out and peak <= (problem.limit_nbytes or math.inf):
            found.append((peak, seconds) if objective == "memory" else (seconds, peak))
    return min(found, default=None)  # type: ignore[return-value]


@pytest.mark.parametrize("objective", ["memory", "time"])
@pytest.mark.parametrize("seed", range(12))
def test_the_next_best_is_what_trying_everything_finds(seed: int, objective: str) -> None:
    problem = random_problem(seed, nodes=(3, 5), forbid=0.05)
    try:
        known = solve(problem, objective=objective, gap=0).choice
    except PlanError:
        pytest.skip("everything is forbidden in it")
    source = [Forbidden(options={k: {known[k]}}, pairs={}) for k in range(len(problem.nodes))]
    for edge in problem.edges:
        if sum(other.nodes == edge.nodes for other in problem.edges) == 1:
            source.append(Forbidden(options={}, pairs={edge.nodes: {(known[edge.nodes[0]], known[edge.nodes[1]])}}))
    told = 0
    for forbidden in source:
        best = best_of_all(problem, forbidden, objective)
        try:
            other = next_best(problem, known, forbidden, objective=objective, seconds=20, gap=0)
        except PlanError:
            other = None  # nothing goes with what is left
        assert (other is None) == (best is None)
        if other is None or best is None:
            continue
        told += 1
        if objective == "memory":
            assert (other.peak_nbytes, other.seconds) == pytest.approx(best)
        else:
            assert other.seconds == pytest.approx(best[0])
        assert all(other.choice[k] not in options for k, options in forbidden.options.items())
    assert told


def test_where_there_is_no_other_choice_there_is_none() -> None:
    problem = random_problem(3)
    every = {0: set(range(len(problem.nodes[0].options)))}
    choice = [0] * len(problem.nodes)
    assert next_best(problem, choice, Forbidden(options=every, pairs={}), objective="memory", seconds=5, gap=0) is None
    with pytest.raises(PlanError, match="no edge between nodes 0 and 99"):
        next_best(problem, choice, Forbidden(options={}, pairs={(0, 99): {(0, 0)}}), objective="memory", seconds=5, gap=0)


@pytest.mark.parametrize("seed", range(20))
def test_what_nodes_hold_is_all_that_is_held(seed: int) -> None:
    """What is held between two nodes is told of both."""
    problem = random_problem(seed, forbid=0)
    choice = [0] * len(problem.nodes)
    peak, point, _, kinds = evaluate(problem, choice)
    told = [held_at(problem, choice, point, [k]) for k in range(len(problem.nodes))]
    assert sum(sum(own.values()) for own, _ in told) + sum(copies for _, copies in told) // 2 == peak
    assert held_at(problem, choice, point, range(len(problem.nodes))) == (pytest.approx(kinds), 0)


# Names of moments.


def _tiny(**others: object) -> Problem:
    node = Node(name="n", options=("a",), seconds=(1.0,), holds=(Hold(first=1, last=1, kind="activations", nbytes=(4096,)),))
    return Problem(points=2, nodes=(node,), **others)  # type: ignore[arg-type]


def test_what_does_not_fit_is_said_by_the_operator_that_runs_then() -> None:
    problem = _tiny(limit_nbytes=100, where=("blocks.0, aten.mm.default", "blocks.1, aten.gelu.default, backward"))
    with pytest.raises(FitError, match=r"4\.0 KiB, at blocks\.1, aten\.gelu\.default, backward, the limit is 100 B") as error:
        solve(problem)
    assert error.value.least_nbytes == 4096
    with pytest.raises(FitError, match="at point 1 of 2"):
        solve(replace(problem, where=()))


def test_names_of_moments_are_kept_in_json_and_must_be_all() -> None:
    named = _tiny(where=("one", "two"))
    assert Problem.from_json(named.to_json()) == named
    assert "where" not in _tiny().to_json()
    assert Problem.from_json(_tiny().to_json()) == _tiny()
    with pytest.raises(PlanError, match="a text for each of 2 points"):
        _tiny(where=("one",))


# Words on a search.


def test_a_search_is_told_in_words_no_faster_than_they_can_be_read() -> None:
    now, said = [0.0], []
    tell = in_words(said.append, "on the mesh x=4: ", clock=lambda: now[0])
    tell("peak", math.inf, 1024)
    tell("peak", 4096, 2048)  # too soon
    now[0] = SECONDS_BETWEEN
    tell("peak", 4096, 2048)
    tell("seconds", 0.5, 0.25)  # of something else: at once
    assert said == [
        "on the mesh x=4: nothing found yet, none below 1.0 KiB",
        "on the mesh x=4: least peak so far 4.0 KiB, none below 2.0 KiB",
        "on the mesh x=4: least step so far 0.5 s, none below 0.25 s",
    ]


def test_bytes_are_never_counted_in_parts_of_one() -> None:
    """Where the limit is what is there anyhow, a finer unit made numbers that HiGHS gave up on."""
    held = Hold(first=0, last=0, kind="parameters", nbytes=(1 << 20, (1 << 20) + 5))
    problem = Problem(points=1, nodes=(Node(name="n", options=("a", "b"), seconds=(2.0, 1.0), holds=(held,)),))
    units = _SolverCall(Session(problem), "seconds", 1 << 20, math.inf, 5.0, 0.0).units()
    assert units["peak"] == 1.0
    assert units["seconds"] < 1.0
