"""The planner's solutions against all choices there are; limits that nothing fits; bounds, prices, frontiers, both solvers."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.solver.command import blocks_problem
from scrimp.errors import FitError, PlanError
from scrimp.planner import Edge, Hold, Node, Problem, Solution, evaluate, frontier, solve, solver_name
from scrimp.planner.solver import backend, session
from scrimp.planner.solver.model import HELD, PEAK, SECONDS, Model
from scrimp.planner.solver.presolve import reduce
from tests.support.planner.problems import every_choice, random_problem

SEEDS = st.integers(0, 10**6)

needs_highspy = pytest.mark.skipif(find_spec("highspy") is None, reason="highspy is not installed (scipy plans too)")


def _near(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=1e-8, abs_tol=1e-15)


def _agree(problem: Problem, solver: str | None = None) -> None:
    """All three objectives, with everything asked for, against trying all."""
    choices = every_choice(problem)
    if not choices:
        with pytest.raises(PlanError, match=r"infeasible problem|no feasible choice"):
            solve(problem, gap=0.0, solver=solver)
        return
    least = min(peak for peak, _, _ in choices)
    memory = solve(problem, gap=0.0, solver=solver)
    assert memory.peak_nbytes == least
    assert _near(memory.seconds, min(seconds for peak, _, seconds in choices if peak == least))
    held = min(total for _, total, _ in choices)
    redundancy = solve(problem, objective="redundancy", gap=0.0, solver=solver)
    assert redundancy.held_nbytes == held
    assert _near(redundancy.seconds, min(seconds for _, total, seconds in choices if total == held))
    limit = (least + max(peak for peak, _, _ in choices)) // 2
    quick = solve(replace(problem, limit_nbytes=limit), objective="time", gap=0.0, solver=solver)
    assert quick.peak_nbytes <= limit
    assert _near(quick.seconds, min(seconds for peak, _, seconds in choices if peak <= limit))
    within = [(total, seconds) for peak, total, seconds in choices if peak <= limit]
    bounded = solve(replace(problem, limit_nbytes=limit), objective="redundancy", gap=0.0, solver=solver)
    assert bounded.peak_nbytes <= limit
    assert bounded.held_nbytes == min(within)[0]
    assert _near(bounded.seconds, min(within)[1])
    slack = solve(problem, slack=0.25, gap=0.0, solver=solver)
    assert slack.peak_nbytes <= least * 1.25
    assert _near(slack.seconds, min(seconds for peak, _, seconds in choices if peak <= least * 1.25))
    for solution in (memory, redundancy, quick, bounded, slack):
        assert solution.status == "optimal", solution
        assert solution.gap <= 1e-8
        assert evaluate(problem, solution.choice) == (
            solution.peak_nbytes, solution.point, solution.seconds, dict(solution.kinds)
        )  # fmt: skip
    if least:
        with pytest.raises(FitError, match=f"Use a limit of {least} bytes or more"):
            solve(replace(problem, limit_nbytes=least - 1), objective="time", gap=0.0, solver=solver)


@given(SEEDS)
def test_solutions_are_the_best_of_all_choices(seed: int) -> None:
    _agree(random_problem(seed))


@given(SEEDS)
def test_with_much_forbidden_too(seed: int) -> None:
    _agree(random_problem(seed, forbid=0.5, nodes=(3, 6)))


@given(st.integers(0, 40))
def test_the_other_solver_finds_the_same(seed: int) -> None:
    _agree(random_problem(seed), solver="scipy")


@given(st.integers(0, 40))
def test_terabytes_and_microseconds_beside_small_numbers(seed: int) -> None:
    """What is always there is large, what differs is a millionth of it; some options are absurdly slow or large."""
    problem, rng = random_problem(seed, nbytes=10**6, constant=10**12), random.Random(seed)
    nodes = []
    for node in problem.nodes:
        seconds = (*(value * 1e-3 for value in node.seconds), 1e5, 1e-9)
        holds = tuple(replace(hold, nbytes=(*hold.nbytes, 10**12, 10**15)) for hold in node.holds)
        holds += (Hold(first=0, last=0, kind="huge", nbytes=(*(rng.randint(0, 3) for _ in node.options), 0, 10**15)),)
        nodes.append(replace(node, options=(*node.options, "slow", "large"), seconds=seconds, holds=holds))
    edges = []
    for edge in problem.edges:
        wide = tuple((*(value * 1e-3 for value in row), 1.0, 0.0) for row in edge.seconds)
        width = len(wide[0])
        pairs = tuple(
            replace(hold, nbytes=(*((*row, 10**12, 10**12) for row in hold.nbytes), *((10**12,) * width,) * 2))
            for hold in edge.holds
        )
        edges.append(replace(edge, seconds=(*wide, (1.0,) * width, (0.0,) * width), holds=pairs))
    if math.prod(len(node.options) for node in nodes) <= 4000:
        _agree(replace(problem, nodes=tuple(nodes), edges=tuple(edges)))


def test_where_no_choice_is_known_beforehand_large_numbers_are_scaled_too() -> None:
    """Colourings with three colours, of which small steps find none here: only pairs that differ are allowed."""
    rng = random.Random(5)
    names, size = ("red", "green", "blue"), 9
    nodes = tuple(
        Node(
            name=f"n{i}",
            options=names,
            seconds=tuple(rng.uniform(1, 2) for _ in names),
            holds=(Hold(first=0, last=0, kind="k", nbytes=tuple(rng.randint(0, 10**14) for _ in names)),),
        )
        for i in range(size)
    )
    differ = tuple(tuple(math.inf if a == b else 0.0 for b in range(3)) for a in range(3))
    edges = tuple(Edge(nodes=(i, (i + k) % size), seconds=differ) for i in range(size) for k in (1, 2))
    problem = Problem(points=1, nodes=nodes, edges=edges)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "improve", lambda reduced, choice, *_: tuple(choice))
        _agree(problem)


@settings(max_examples=20)
@given(SEEDS)
def test_the_same_problem_gives_the_same_choice(seed: int) -> None:
    problem = random_problem(seed, forbid=0.0, nodes=(4, 8))
    again = Problem.from_json(problem.to_json())
    assert solve(problem, gap=0.0).choice == solve(again, gap=0.0).choice == solve(problem, gap=0.0).choice


@pytest.mark.parametrize("gap", [0.01, 0.2])
def test_gaps_are_what_they_say(gap: float) -> None:
    """The bound is below the best there is, and the value no further from it than asked for."""
    for seed in range(30):
        problem = random_problem(seed, forbid=0.0)
        choices = every_choice(problem)
        least = min(peak for peak, _, _ in choices)
        loose = solve(problem, gap=gap)
        first, last = loose.phases
        assert first.bound <= least <= first.value <= loose.phases[0].bound / (1 - gap) + 1e-9
        best = min(seconds for peak, _, seconds in choices if peak <= first.value)
        assert last.bound <= best * (1 + 1e-12)
        assert best <= last.value * (1 + 1e-12)
        assert loose.gap <= gap
        assert loose.status in ("optimal", "within gap")


def test_a_limit_that_only_the_least_peak_fits_is_met_whatever_the_gap() -> None:
    for seed in range(30):
        problem = random_problem(seed, forbid=0.0)
        least = min(peak for peak, _, _ in every_choice(problem))
        for objective in ("memory", "time", "redundancy"):
            assert solve(replace(problem, limit_nbytes=least), objective=objective, gap=0.5).peak_nbytes == least


@pytest.mark.parametrize("solver", [pytest.param("highspy", marks=needs_highspy), "scipy"])
def test_one_byte_over_the_limit_is_over_it_though_no_solver_sees_it(solver: str) -> None:
    """A solver's tolerance is a part of the limit, and this byte is a smaller one."""
    large = 10**14
    options = ("all", "less", "none")
    hold = Hold(first=0, last=0, kind="k", nbytes=(large, large - 1, 0))
    node = Node(name="n", options=options, seconds=(0.0, 1.0, 10.0), holds=(hold,))
    problem = Problem(points=1, nodes=(node,) * 3)
    for missing in range(4):
        solution = solve(replace(problem, limit_nbytes=3 * large - missing), objective="time", gap=0.0, solver=solver)
        assert (solution.seconds, solution.peak_nbytes) == (float(missing), 3 * large - missing)


def _knapsack(items: int, seed: int = 3) -> Problem:
    """Seconds or bytes, of many nodes: the linear program splits one of them, so that branch and bound has to be asked."""
    rng = random.Random(seed)
    nodes = []
    for i in range(items):
        weight = rng.randint(500, 1500)
        hold = Hold(first=0, last=0, kind="activations", nbytes=(weight, weight // 2, 0))
        worth = weight * rng.uniform(0.9, 1.1)
        nodes.append(
            Node(name=f"n{i}", options=("keep", "half", "drop"), seconds=(0.0, worth * 0.45e-6, worth * 1e-6), holds=(hold,))
        )
    return Problem(points=1, nodes=tuple(nodes), limit_nbytes=sum(node.holds[0].nbytes[0] for node in nodes) // 3)


@needs_highspy
def test_branch_and_bound_finds_what_rounding_does_not_and_both_solvers_agree() -> None:
    problem = _knapsack(25)
    told: list[tuple[str, float, float]] = []
    one = solve(problem, objective="time", gap=0.0, progress=lambda *each: told.append(each))
    two = solve(problem, objective="time", gap=0.0, solver="scipy")
    assert (one.solver, two.solver) == ("highspy", "scipy")
    assert _near(one.seconds, two.seconds)
    assert one.status == "optimal"
    # By dynamic programming over bytes, which has nothing in common with it.
    best = {0: 0.0}
    for node in problem.nodes:
        nxt: dict[int, float] = {}
        for used, spent in best.items():
            for nbytes, seconds in zip(node.holds[0].nbytes, node.seconds, strict=True):
                if used + nbytes <= (problem.limit_nbytes or 0):
                    nxt[used + nbytes] = min(nxt.get(used + nbytes, math.inf), spent + seconds)
        best = nxt
    assert _near(one.seconds, min(best.values()))
    assert {name for name, _, _ in told} == {SECONDS}
    assert all(bound <= value * (1 + 1e-9) for _, value, bound in told)
    assert min(value for _, value, _ in told) == pytest.approx(one.seconds)


def test_the_price_of_a_byte_is_what_a_byte_more_saves() -> None:
    problem = _knapsack(200)
    limit = problem.limit_nbytes or 0
    solution = solve(problem, objective="time", gap=0.0)
    more = solve(replace(problem, limit_nbytes=limit + 5000), objective="time", gap=0.0)
    assert solution.seconds_per_byte == pytest.approx((solution.seconds - more.seconds) / 5000, rel=0.02)
    assert solve(replace(problem, limit_nbytes=None), objective="time").seconds_per_byte == 0
    scipy = solve(problem, objective="time", gap=0.0, solver="scipy")
    assert scipy.seconds_per_byte == pytest.approx(solution.seconds_per_byte, rel=1e-6)


def test_what_does_not_fit_says_what_would() -> None:
    hold = Hold(first=1, last=2, kind="activations", nbytes=(3 << 20, 2 << 20))
    node = Node(name="n", options=("a", "b"), seconds=(1.0, 2.0), holds=(hold,))
    problem = Problem(points=4, nodes=(node, replace(node, name="m")), limit_nbytes=(4 << 20) - 1)
    for objective in ("memory", "time", "redundancy"):
        with pytest.raises(
            FitError,
            match=r"the least peak found is 4\.0 MiB, at point 1 of 4, the limit is 4\.0 MiB: 1 B too little\. "
            r"Held there: activations 4\.0 MiB\. Use a limit of 4194304 bytes or more",
        ):
            solve(problem, objective=objective)
        fits = solve(replace(problem, limit_nbytes=4 << 20), objective=objective)
        assert (fits.choice, fits.peak_nbytes, fits.point, fits.kinds) == ((1, 1), 4 << 20, 1, (("activations", 4 << 20),))


def test_no_choice_at_all_is_an_error_of_the_plan() -> None:
    node = Node(name="n", options=("a", "b"), seconds=(1.0, 1.0))
    same = ((0.0, math.inf), (math.inf, 0.0))
    # Two colours do not colour a triangle, and no edge alone shows it.
    edges = tuple(Edge(nodes=pair, seconds=tuple(row[::-1] for row in same)) for pair in ((0, 1), (1, 2), (0, 2)))
    with pytest.raises(PlanError, match="no feasible choice for 3 nodes and 3 edges: every choice has a forbidden pair"):
        solve(Problem(points=1, nodes=(node,) * 3, edges=edges))
    alone = replace(node, seconds=(1.0, math.inf))
    with pytest.raises(
        PlanError, match="every option of node 'n' is forbidden, by itself or by all options left of its neighbours n"
    ):
        solve(Problem(points=1, nodes=(alone, replace(node, seconds=(math.inf, 1.0))), edges=(Edge(nodes=(0, 1), seconds=same),)))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"objective": "speed"}, "objective 'speed': there are 'memory', 'time' and 'redundancy'"),
        ({"gap": 1.0}, "gap from 0 to 1"),
        ({"slack": -0.1}, "slack is 0 or more"),
        ({"seconds": 0}, "seconds more than 0"),
        ({"warm": (0,)}, "a choice of 1 options"),
        ({"starts": ((0, 0, 0), (0, 0, 9))}, "there is none with index 9"),
    ],
)
def test_questions_that_make_no_sense_are_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        solve(_knapsack(3), **asked)  # type: ignore[arg-type]


def test_a_warm_start_is_taken_and_never_made_worse() -> None:
    problem = _knapsack(60)
    best = solve(problem, objective="time", gap=0.0)
    told: list[float] = []
    again = solve(problem, objective="time", gap=0.0, warm=best.choice, progress=lambda _, value, bound: told.append(value))
    assert told[0] == best.seconds
    assert again.seconds == best.seconds


@given(SEEDS)
def test_a_solution_is_no_worse_than_the_best_start_within_the_limit(seed: int) -> None:
    problem = random_problem(seed, forbid=0.0)
    rng = random.Random(seed)
    starts = [tuple(rng.randrange(len(node.options)) for node in problem.nodes) for _ in range(4)]
    judged = [evaluate(problem, start) for start in starts]
    limit = sorted(each.peak_nbytes for each in judged)[1]
    limited = replace(problem, limit_nbytes=limit)
    hurried = solve(limited, objective="time", starts=starts, seconds=1e-6, gap=0.5)
    assert hurried.peak_nbytes <= limit
    assert hurried.seconds <= min(each.seconds for each in judged if each.peak_nbytes <= limit)
    assert solve(problem, starts=starts, seconds=1e-6, gap=0.5).peak_nbytes <= min(each.peak_nbytes for each in judged)


def test_without_time_there_is_still_a_choice_and_an_honest_gap() -> None:
    problem = blocks_problem(4, 17, 12, "each")
    hurried = solve(problem, seconds=0.2, gap=0.0)
    assert hurried.status == "time limit"
    assert 0 < hurried.gap <= 1
    assert evaluate(problem, hurried.choice).peak_nbytes == hurried.peak_nbytes
    assert hurried.phases[0].bound <= solve(problem, seconds=2, gap=0.05).peak_nbytes


def _front_is_sound(front: list[Solution]) -> None:
    assert [each.peak_nbytes for each in front] == sorted({each.peak_nbytes for each in front})
    assert [each.seconds for each in front] == sorted({each.seconds for each in front}, reverse=True)


@given(SEEDS)
def test_a_frontier_is_of_choices_that_none_betters(seed: int) -> None:
    problem = random_problem(seed, forbid=0.0)
    choices = every_choice(problem)
    front = frontier(problem, 5, gap=0.0)
    _front_is_sound(front)
    least = min(peak for peak, _, _ in choices)
    assert front[0].peak_nbytes == least
    assert _near(front[0].seconds, min(seconds for peak, _, seconds in choices if peak == least))
    assert _near(front[-1].seconds, min(seconds for _, _, seconds in choices))
    for each in front:
        assert _near(each.seconds, min(seconds for peak, _, seconds in choices if peak <= each.peak_nbytes))


def test_a_frontier_ends_at_the_limit() -> None:
    problem = _knapsack(40)
    front = frontier(problem, 6)
    _front_is_sound(front)
    assert len(front) == 6
    assert front[-1].peak_nbytes <= (problem.limit_nbytes or 0)
    with pytest.raises(PlanError, match="2 points or more"):
        frontier(problem, 1)


def test_rows_of_changes_and_rows_of_points_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = blocks_problem(3, 6, 6, "each")
    reduced = reduce(problem)
    found = []
    for telescoped in (True, False):
        monkeypatch.setattr(Model, "telescoped", telescoped)
        model = Model(reduced)
        model.restart({PEAK: 1e6, HELD: 1e6, SECONDS: 1e-3})
        assert len(model.usage) == (len(reduced.floor) if telescoped else 0)
        for objective in (PEAK, HELD, SECONDS):
            program = model.program(objective, 2e9 if objective == SECONDS else math.inf, math.inf, math.inf)
            found.append(backend.minimise(program, whole=False, seconds=10).bound)
            if objective == PEAK:
                choice = tuple(0 for _ in reduced.nodes)
                values = model.write(choice)
                assert float(program.cost @ values) * 1e6 == pytest.approx(
                    evaluate(problem, reduced.original(choice)).peak_nbytes
                )
                assert model.read(values) == choice
    assert found[:3] == pytest.approx(found[3:], rel=1e-7)


@needs_highspy
def test_another_user_of_the_solver_does_not_disturb() -> None:
    """HiGHS has one set of threads for a process, and refuses to run with another number of them."""
    code = (
        "import highspy; from tests.planner.solver.test_solve import _knapsack; from scrimp.planner import solve\n"
        "other = highspy.Highs(); other.silent(); other.setOptionValue('threads', 2); other.setOptionValue('parallel', 'on')\n"
        "x, y = other.addBinary(), other.addBinary(); other.addConstr(x + y <= 1); other.maximize(x + 2 * y)\n"
        "assert solve(_knapsack(25), objective='time', gap=0.0).status == 'optimal'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_highspy
def test_what_the_solver_cannot_read_is_an_error() -> None:
    model = Model(reduce(_knapsack(5)))
    program = model.program(SECONDS, 2e3, math.inf, math.inf)
    with pytest.raises(PlanError, match=r"HiGHS .* cannot solve a program of .* variables"):
        backend.minimise(replace(program, value=program.value * 1e20), whole=True, seconds=1)


@needs_highspy
def test_which_solver_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert solver_name() == "highspy"
    there = backend.importlib.util.find_spec
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None if name == "highspy" else there(name))
    assert solver_name() == "scipy"
    assert solve(_knapsack(5), objective="time").solver == "scipy"
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match="pip install highspy"):
        solver_name()
