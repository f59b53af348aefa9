"""The best plan on one mesh. Where there are too many ways to split to look at all of them, it is found step by step.

Each axis of a mesh splits one of six things or so: on two axes there are 36 ways for an operator, on three 216, and edges
between operators have tables of all pairs. So a mesh of three axes is looked at as meshes of two first, two neighbouring axes
being one: a plan on those is a plan on three, where both split the same. From there on, what differs in one axis from what has
been chosen is looked at too, all of it at once, by the same integer program, until nothing better comes of it.

That proves nothing, but what no plan can be below is known (`mesh/relaxation_bound.py`).

Every search has the choices of known parallelisms as its first incumbents (`baselines/starts.py`). They are evaluated even if
the deadline has passed; one of them is then the answer, if it is within the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import ne

from scrimp.cluster import Cluster
from scrimp.errors import FitError
from scrimp.layout import Mesh
from scrimp.planner.baselines.starts import Known
from scrimp.planner.build.assembly import Assembly
from scrimp.planner.build.on_mesh import Layers, Looked, OnMesh
from scrimp.planner.cost.zero_levels import Precision, levels
from scrimp.planner.deadline import Deadline
from scrimp.planner.mesh.relaxation_bound import bound_on
from scrimp.planner.shard.options import Split
from scrimp.planner.solver.model import HELD, PEAK, SECONDS
from scrimp.planner.solver.problem import Problem
from scrimp.planner.solver.progress import in_words
from scrimp.planner.solver.session import Session
from scrimp.planner.solver.solve import MEMORY, REDUNDANCY, TIME, Solution, result

MOST = 64  # ways to split an operator, all of which are looked at at once
BETTER = 1e-3  # as a part, what is worth another look
START_GAP = 0.05  # good enough to look on from
_MEASURES = {MEMORY: PEAK, TIME: SECONDS, REDUNDANCY: HELD}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is wanted of a plan on any mesh."""

    precision: Precision
    ways: Sequence[str]
    objective: str
    limit_nbytes: int | None
    gap: float
    deadline: Deadline
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Best:
    """`on`: what is known of the mesh. `bound`: what the objective (bytes of the peak, bytes held, or seconds) cannot be below;
    None: not asked for yet. `near`: not all ways to split were looked at, and `bound` is that of all of them, and of layers that
    choose each for itself. `searched`: not so where only known parallelisms were compared."""

    on: OnMesh
    assembly: Assembly
    problem: Problem
    solution: Solution
    bound: float | None
    near: bool
    searched: bool = True


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """By part and group: how it is split and what becomes of what it saves; how its weights are shared out."""

    splits: Mapping[tuple[int, int], tuple[Split, str]]
    levels: Mapping[tuple[int, int], tuple[int, ...]]


def best_on(layers: Layers, cluster: Cluster, mesh: Mesh, request: Request) -> Best:
    """If too little time is left to search: the best of the known parallelisms, or, if none is within the limit, a short
    search. To draw up the whole problem takes a quarter to half as long as theirs."""
    begin, on = time.monotonic(), OnMesh(layers, cluster, mesh)
    known = [*_known_on(on, request)]
    if known and request.deadline.left() <= (time.monotonic() - begin) / 4:
        least = _least(known, request)
        if least is not None:
            return least
    firsts = [_chosen(one) for one in known]
    if max((len(ways) for groups in on.every for ways in groups), default=0) <= MOST:
        return _solved(on, request, starts=firsts)
    starts = [_start(layers, cluster, merged, at, request) for merged, at in merged_meshes(mesh)]
    bound = bound_of(on, request, request.deadline.part(1 / 4))
    best: Best | None = None
    while True:
        request.say(f"planning on the mesh {mesh}, near what has been found")
        found = _solved(on, request, near(on, starts, firsts), [*starts, *firsts], bound)
        if best is not None and not _better(found, best, request.objective):
            return best
        best = found
        if request.deadline.passed:
            return best
        starts = [_chosen(found)]


def best_known_on(layers: Layers, cluster: Cluster, mesh: Mesh, request: Request) -> Best | None:
    """Of known parallelisms alone, within the limit; None if there is none."""
    return _least(_known_on(OnMesh(layers, cluster, mesh), request), request)


def _least(known: Iterable[Best], request: Request) -> Best | None:
    within = [one for one in known if request.limit_nbytes is None or one.solution.peak_nbytes <= request.limit_nbytes]
    return min(within, key=lambda one: order(one.solution, request.objective), default=None)


def bound_of(on: OnMesh, request: Request, deadline: Deadline) -> float:
    """Of what is asked to be least, over all ways to split."""
    return bound_on(on, request.precision, request.ways, _MEASURES[request.objective], request.limit_nbytes, deadline=deadline)


def order(solution: Solution, objective: str) -> tuple[float, float]:
    """The less, the better."""
    first = {MEMORY: solution.peak_nbytes, REDUNDANCY: solution.held_nbytes}.get(objective, solution.seconds)
    return first, solution.peak_nbytes if objective == TIME else solution.seconds


def _known_on(on: OnMesh, request: Request) -> Iterator[Best]:
    request.say(f"comparing known parallelisms on the mesh {on.mesh}")
    for one in Known(on, request.precision, request.ways).every():
        yield Best(
            on=on, assembly=one.assembly, problem=one.problem, solution=one.solution, bound=None, near=True, searched=False
        )


def merged_meshes(mesh: Mesh) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
    """Two neighbouring axes as one; and of each axis of the mesh, which one it is there."""
    for k in range(len(mesh.axes) - 1):
        (name, one), (_, other) = mesh.axes[k : k + 2]
        merged = Mesh((*mesh.axes[:k], (name, one * other), *mesh.axes[k + 2 :]))
        yield merged, tuple(j if j <= k else j - 1 for j in range(len(mesh.axes)))


def near(on: OnMesh, starts: Sequence[Chosen], also: Sequence[Chosen] = ()) -> Looked:
    """Of each group what some layer chose, and all that differs from that in one axis; of `also` what was chosen alone."""
    graph, looked = on.layers.graph, []
    for k, groups in enumerate(on.every):
        mine = [j for j, part in enumerate(on.layers.parts) if graph.layers[part.first].graph == k]
        looked.append(tuple(_around(ways, _splits(starts, mine, g), _splits(also, mine, g)) for g, ways in enumerate(groups)))
    return tuple(looked)


def _splits(starts: Sequence[Chosen], parts: Sequence[int], g: int) -> set[Split]:
    return {start.splits[j, g][0] for start in starts for j in parts}


def _around(ways: Sequence[Split], chosen: set[Split], also: set[Split]) -> tuple[Split, ...]:
    return tuple(way for way in ways if way in also or any(sum(map(ne, way, one)) <= 1 for one in chosen))


def _start(layers: Layers, cluster: Cluster, merged: Mesh, at: Sequence[int], request: Request) -> Chosen:
    """What is best on a mesh of fewer axes, as a choice of the mesh itself; if nothing is within the limit, the least."""
    request.say(f"planning on the mesh {merged}")
    soon = replace(request, deadline=request.deadline.part(1 / 4), gap=max(request.gap, START_GAP))
    try:
        best = best_on(layers, cluster, merged, soon)
    except FitError:
        best = best_on(layers, cluster, merged, replace(soon, objective=MEMORY, limit_nbytes=None))
    found = _chosen(best)
    return Chosen(
        splits={key: (tuple(split[j] for j in at), way) for key, (split, way) in found.splits.items()},
        levels={key: tuple(level[j] for j in at) for key, level in found.levels.items()},
    )


def _solved(
    on: OnMesh, request: Request, looked: Looked | None = None, starts: Sequence[Chosen] = (), bound: float | None = None
) -> Best:
    assembly = on.assembly(request.precision, request.ways, looked)
    problem = assembly.sketch.problem(request.limit_nbytes)
    session = Session(problem, progress=in_words(request.say, f"on the mesh {on.mesh}: "))
    for start in starts:
        session.learn(_choice(assembly, start))
    seconds = request.deadline.left() / (1 if looked is None else 2)
    solution = result(
        session, request.objective, request.limit_nbytes, slack=0.0, seconds=seconds, gap=request.gap, begin=time.monotonic()
    )
    known = solution.phases[0].bound if bound is None else bound
    return Best(on=on, assembly=assembly, problem=problem, solution=solution, bound=known, near=looked is not None)


def _chosen(best: Best) -> Chosen:
    assembly, choice = best.assembly, best.solution.choice
    every, splits = levels(assembly.moves.mesh, assembly.precision), {}
    for (k, g), node in assembly.nodes.items():
        ways = assembly.ways[k, g]
        splits[k, g] = assembly.parts[k].model.options[g][ways.split_of(choice[node])].split, ways.way_of(choice[node])
    return Chosen(splits=splits, levels={key: every[choice[node]] for key, node in assembly.rest.items()})


def _choice(assembly: Assembly, chosen: Chosen) -> tuple[int, ...]:
    """As the problem's, which must have its splits."""
    found = [0] * len(assembly.sketch.nodes)
    for (k, g), node in assembly.nodes.items():
        split, way = chosen.splits[k, g]
        ways, options = assembly.ways[k, g].names, [option.split for option in assembly.parts[k].model.options[g]]
        found[node] = options.index(split) * len(ways) + ways.index(way)
    every = levels(assembly.moves.mesh, assembly.precision)
    for key, node in assembly.rest.items():
        found[node] = every.index(chosen.levels[key])
    return tuple(found)


def _better(one: Best, other: Best, objective: str) -> bool:
    """By enough to look on."""
    (a, a_then), (b, b_then) = order(one.solution, objective), order(other.solution, objective)
    return a < (1 - BETTER) * b or (objective != TIME and a <= b and a_then < (1 - BETTER) * b_then)
