"""The planner's problem: what makes sense, JSON and back, what a choice comes to, which points can be the peak."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.errors import PlanError
from scrimp.planner import Edge, Hold, Node, PairHold, Problem, evaluate, held_nbytes
from scrimp.planner.solver.points import maximal_points
from scrimp.planner.solver.presolve import reduce
from tests.support.planner.problems import naive, random_problem

NODE = Node(name="mm", options=("a", "b"), seconds=(1.0, 2.0), holds=(Hold(first=0, last=2, kind="parameters", nbytes=(4, 8)),))
EDGE = Edge(
    nodes=(0, 1),
    seconds=((0.0, math.inf), (1.0, 0.0)),
    holds=(PairHold(first=1, last=1, kind="temporaries", nbytes=((0, 1), (2, 3))),),
)
PROBLEM = Problem(points=3, nodes=(NODE, replace(NODE, name="add")), edges=(EDGE,), limit_nbytes=20)


@given(st.integers(0, 10**6))
def test_a_problem_survives_json(seed: int) -> None:
    problem = replace(random_problem(seed), limit_nbytes=random.Random(seed).choice([None, 0, 12345]))
    assert Problem.from_json(problem.to_json()) == problem
    json.loads(problem.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_json_writes_rows_that_are_alike_once() -> None:
    wide = tuple(range(1000, 1036))
    node = Node(name="n", options=tuple(f"o{p}" for p in range(36)), seconds=tuple(map(float, wide)))
    table = tuple(tuple(float(q + p % 8) for q in wide) for p in range(36))
    held = (PairHold(first=0, last=0, kind="temporaries", nbytes=(wide,) * 36),)
    edges = tuple(Edge(nodes=(i, i + 1), seconds=table, holds=held) for i in range(49))
    text = Problem(points=1, nodes=(node,) * 50, edges=edges).to_json()
    assert text.count("1000,1001,1002") == 1  # bytes
    assert text.count("1000.0,1001.0,1002.0") == 1  # seconds
    assert len(text) < 20_000


def test_numbers_of_numpy_survive_json() -> None:
    hold = Hold(first=0, last=0, kind="k", nbytes=tuple(np.array([1, 2])))
    node = Node(name="n", options=("a", "b"), seconds=tuple(np.array([1.0, np.inf])), holds=(hold,))
    assert Problem.from_json(Problem(points=1, nodes=(node,)).to_json()).nodes[0].holds[0].nbytes == (1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not a problem file of scrimp"),
        (
            '{"format": "scrimp.plan", "version": 1}',
            "this is scrimp.plan version 1, but this scrimp reads scrimp.problem version 1",
        ),
        (PROBLEM.to_json().replace('"version":1', '"version":2'), "version 2"),
        (PROBLEM.to_json().replace('"nodes"', '"knots"'), "damaged: KeyError 'nodes'"),
        (PROBLEM.to_json().replace('["mm",0,0', '["mm",7,0'), "damaged: IndexError"),
        (PROBLEM.to_json().replace('"points":3', '"points":2'), "from point 0 to 2, but the points are 0 to 1"),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Problem.from_json(text)


def _hold(**changes: object) -> dict[str, object]:
    return {"nodes": (replace(NODE, holds=(replace(NODE.holds[0], **changes),)), NODE)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"points": 0}, "1 point or more, not 0"),
        ({"nodes": (), "edges": ()}, "without nodes"),
        ({"limit_nbytes": -1}, "limit_nbytes is a number of bytes, 0 or more, or None, not -1"),
        ({"limit_nbytes": 1.5}, "not 1.5"),
        ({"nodes": (replace(NODE, options=()), NODE)}, "node 0 'mm' has no options"),
        ({"nodes": (replace(NODE, seconds=(1.0,)), NODE)}, "2 options and seconds of 1"),
        ({"nodes": (NODE, replace(NODE, seconds=(1.0, math.nan)))}, "seconds of node 1 'mm' must be 0 or more .* but one is nan"),
        ({"nodes": (NODE, replace(NODE, seconds=(1.0, -2.0)))}, "but one is -2.0"),
        ({"nodes": (NODE, replace(NODE, seconds=(math.inf, math.inf)))}, "node 1 'mm': no option of it is allowed, all 2"),
        (_hold(first=2, last=1), "hold 'parameters' of node 0 'mm' is from point 2 to 1, but the points are 0 to 2"),
        (_hold(last=3), "from point 0 to 3"),
        (_hold(first=-1), "from point -1"),
        (_hold(nbytes=(1, 2, 3)), r"bytes of the hold 'parameters' of node 0 'mm' must be a table of numbers of shape \(2,\)"),
        (_hold(nbytes=(1, -2)), "whole numbers from 0 to 2\\^53, but they are from -2 to 1"),
        (_hold(nbytes=(1, 2.5)), "whole numbers"),
        (_hold(nbytes=(1, 1 << 60)), "whole numbers"),
        ({"edges": (replace(EDGE, nodes=(0, 2)),)}, "edge 0 is between nodes 0 and 2: it takes two of the nodes 0 to 1"),
        ({"edges": (replace(EDGE, nodes=(1, 1)),)}, "between nodes 1 and 1"),
        (
            {"edges": (replace(EDGE, seconds=((0.0, 1.0),)),)},
            r"edge 0 from 'mm' to 'add' must be .* of shape \(2, 2\).* has \[2\]",
        ),
        ({"edges": (replace(EDGE, seconds=((0.0, 1.0), (0.0,))),)}, r"this has \[2, 1\]"),
        ({"edges": (replace(EDGE, seconds=((math.inf,) * 2,) * 2),)}, "no pair of their options is allowed, all 4"),
        ({"edges": (replace(EDGE, holds=(replace(EDGE.holds[0], nbytes=((1, 2),)),)),)}, "'temporaries' of edge 0"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(PROBLEM, **changes)


@given(st.integers(0, 10**6))
def test_a_choice_comes_to_what_a_loop_over_points_says(seed: int) -> None:
    problem, rng = random_problem(seed), random.Random(seed)
    choice = tuple(rng.randrange(len(node.options)) for node in problem.nodes)
    found = evaluate(problem, choice)
    assert (found.peak_nbytes, held_nbytes(problem, choice), found.seconds) == naive(problem, choice)
    assert sum(found.kinds.values()) == found.peak_nbytes
    for end in range(1, found.point + 1):  # the first point at which it is
        cut = [
            replace(n, holds=tuple(replace(h, last=min(h.last, end - 1)) for h in n.holds if h.first < end))
            for n in problem.nodes
        ]
        pairs = [
            replace(e, holds=tuple(replace(h, last=min(h.last, end - 1)) for h in e.holds if h.first < end))
            for e in problem.edges
        ]
        before = Problem(points=end, nodes=tuple(cut), edges=tuple(pairs))
        assert evaluate(before, choice).peak_nbytes < found.peak_nbytes


@pytest.mark.parametrize(
    ("choice", "message"), [((0,), "1 options for 2 nodes"), ((0, 2), "node 'add' has 2 options"), ((0, -1), "index -1")]
)
def test_a_choice_of_another_problem_is_refused(choice: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        evaluate(PROBLEM, choice)


@given(st.integers(0, 10**6))
def test_points_that_are_left_are_those_that_no_other_makes_needless(seed: int) -> None:
    rng = random.Random(seed)
    points = rng.randint(1, 12)
    spans = [tuple(sorted((rng.randrange(points), rng.randrange(points)))) for _ in range(rng.randint(0, 8))]
    floor = np.array([rng.choice([0, 0, 0, 5]) for _ in range(points)])
    live = [{k for k, (first, last) in enumerate(spans) if first <= t <= last} for t in range(points)]
    kept = maximal_points(floor, spans)  # type: ignore[arg-type]
    for t in range(points):
        assert any(live[t] <= live[k] and floor[t] <= floor[k] for k in kept)
    if not floor.any():
        assert not any(live[a] <= live[b] for a in kept for b in kept if a != b)


@given(st.integers(0, 10**6))
def test_a_reduced_problem_says_the_same_of_its_choices(seed: int) -> None:
    problem, rng = random_problem(seed, forbid=0.05), random.Random(seed)
    try:
        reduced = reduce(problem)
    except PlanError:
        return
    choice = tuple(rng.randrange(len(node.seconds)) for node in reduced.nodes)
    found = evaluate(problem, reduced.original(choice))
    picked = list(reduced.picked(choice))
    total = reduced.seconds + sum(float(costs.seconds[at]) for costs, at in picked)
    assert total == pytest.approx(found.seconds, rel=1e-12)
    if total < math.inf:  # what is forbidden may hold anything
        assert int(reduced.profile(choice).max()) == found.peak_nbytes
        assert reduced.held + sum(int(costs.held[at]) for costs, at in picked) == held_nbytes(problem, reduced.original(choice))
    # And any choice has one among those left that does no worse.
    other = tuple(rng.randrange(len(node.options)) for node in problem.nodes)
    mine = naive(problem, other)
    if mine[2] < math.inf:
        back = reduced.reduced(other)
        assert back is not None
        theirs = naive(problem, reduced.original(back))
        assert theirs[0] <= mine[0]
        assert theirs[1] <= mine[1]
        assert theirs[2] <= mine[2]


def test_few_rows_make_few_classes_and_one_option_is_a_constant() -> None:
    rng = random.Random(1)
    rows = [tuple(rng.uniform(1, 2) for _ in range(36)) for _ in range(8)]
    holds = tuple(Hold(first=0, last=0, kind="k", nbytes=tuple(rng.randint(1, 99) for _ in range(36))) for _ in range(2))
    costs = [tuple(rng.uniform(1, 2) for _ in range(36)) for _ in range(2)]
    names = tuple(f"o{p}" for p in range(36))
    nodes = [Node(name="n", options=names, seconds=row, holds=(hold,)) for row, hold in zip(costs, holds, strict=True)]
    nodes.append(Node(name="one", options=("only",), seconds=(3.0,)))
    table = tuple(rows[p % 8] for p in range(36))
    edges = (Edge(nodes=(0, 1), seconds=table), Edge(nodes=(2, 0), seconds=(tuple(range(36)),)))
    reduced = reduce(Problem(points=1, nodes=tuple(nodes), edges=edges))
    assert reduced.free == (0, 1)
    (link,) = reduced.links
    assert link.costs.seconds.shape[0] <= 8
    assert reduced.seconds > 3.0


def test_dominated_options_are_gone_and_of_equals_the_first_stays() -> None:
    hold = Hold(first=0, last=1, kind="k", nbytes=(5, 5, 6, 4, 5))
    node = Node(name="n", options=tuple("abcde"), seconds=(1.0, 1.0, 1.0, 2.0, 0.5), holds=(hold,))
    reduced = reduce(Problem(points=2, nodes=(node, node)))
    assert [list(options) for options in reduced.options] == [[3, 4]] * 2
    same = replace(node, seconds=(1.0,) * 5, holds=(replace(hold, nbytes=(5,) * 5),))
    assert [list(options) for options in reduce(Problem(points=2, nodes=(same,))).options] == [[0]]


def test_planning_loads_no_torch() -> None:
    node = "Node(name='n', options=('a',), seconds=(1.0,))"
    code = f"from scrimp.planner import Node, Problem, solve; solve(Problem(points=1, nodes=({node},)))"
    subprocess.run([sys.executable, "-c", f"{code}; import sys; assert 'torch' not in sys.modules"], check=True)
