"""Finds the best plan on one mesh; in steps, where there are too many sharding options to search all of them at once.

Each axis of a mesh splits one of about six dims: on two axes an operator has 36 options, on three 216, and each edge between
operators has a table of all pairs. So a mesh of three axes is first solved as meshes of two, with two neighbouring axes merged: a
plan on those is a plan on three in which both axes split the same dim. Then the search adds, for all groups at once, the options
that differ from the incumbent in one axis, and solves the same integer program, until it stops improving.

This neighbourhood search proves nothing itself; the lower bound comes from `mesh/relaxation_bound.py`.

Every search is warm-started from the baselines (`baselines/starts.py`). They are evaluated even if the deadline has passed; the
best of them within the limit is then the result.
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
from scrimp.planner.cost.zero_levels import Precision, levels
from scrimp.planner.deadline import Deadline
from scrimp.planner.formulation.assembly import Assembly
from scrimp.planner.formulation.on_mesh import Layers, Looked, OnMesh
from scrimp.planner.mesh.relaxation_bound import bound_on
from scrimp.planner.shard.options import Split
from scrimp.planner.solver.model import HELD, PEAK, SECONDS
from scrimp.planner.solver.problem import Problem
from scrimp.planner.solver.progress import in_words
from scrimp.planner.solver.session import Session
from scrimp.planner.solver.solve import MEMORY, REDUNDANCY, TIME, Solution, result

MOST = 64  # sharding options of an operator up to which all are searched at once
BETTER = 1e-3  # relative improvement worth another round
START_GAP = 0.05  # optimality gap that is enough for a warm start
_MEASURES = {MEMORY: PEAK, TIME: SECONDS, REDUNDANCY: HELD}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The settings of a plan, independent of the mesh."""

    precision: Precision
    ways: Sequence[str]
    objective: str
    limit_nbytes: int | None
    gap: float
    deadline: Deadline
    say: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best plan found on a mesh. `bound`: lower bound of the objective (peak, bytes held, or seconds); None: not computed
    yet. `near`: the search used a subset of the sharding options; `bound` then covers all options and free per-layer choices.
    `searched`: False if only baselines were compared."""

    on: OnMesh
    assembly: Assembly
    problem: Problem
    solution: Solution
    bound: float | None
    near: bool
    searched: bool = True


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """By part and group: the sharding option and activation policy; the ZeRO levels of its weights."""

    splits: Mapping[tuple[int, int], tuple[Split, str]]
    levels: Mapping[tuple[int, int], tuple[int, ...]]


def best_on(layers: Layers, cluster: Cluster, mesh: Mesh, request: Request) -> Best:
    """Searches the mesh. With too little time left it returns the best baseline, or, if none is within the limit, runs a short
    search. Building the whole problem takes a quarter to half as long as building the baselines'."""
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
        request.say(f"planning on the mesh {mesh}, near the best plan so far")
        found = _solved(on, request, near(on, starts, firsts), [*starts, *firsts], bound)
        if best is not None and not _better(found, best, request.objective):
            return best
        best = found
        if request.deadline.passed:
            return best
        starts = [_chosen(found)]


def best_known_on(layers: Layers, cluster: Cluster, mesh: Mesh, request: Request) -> Best | None:
    """The best baseline within the limit; None if there is none."""
    return _least(_known_on(OnMesh(layers, cluster, mesh), request), request)


def _least(known: Iterable[Best], request: Request) -> Best | None:
    within = [one for one in known if request.limit_nbytes is None or one.solution.peak_nbytes <= request.limit_nbytes]
    return min(within, key=lambda one: order(one.solution, request.objective), default=None)


def bound_of(on: OnMesh, request: Request, deadline: Deadline) -> float:
    """The lower bound of the objective over all sharding options."""
    return bound_on(on, request.precision, request.ways, _MEASURES[request.objective], request.limit_nbytes, deadline=deadline)


def order(solution: Solution, objective: str) -> tuple[float, float]:
    """A sort key: less is better."""
    first = {MEMORY: solution.peak_nbytes, REDUNDANCY: solution.held_nbytes}.get(objective, solution.seconds)
    return first, solution.peak_nbytes if objective == TIME else solution.seconds


def _known_on(on: OnMesh, request: Request) -> Iterator[Best]:
    request.say(f"comparing baselines on the mesh {on.mesh}")
    for one in Known(on, request.precision, request.ways).every():
        yield Best(
            on=on, assembly=one.assembly, problem=one.problem, solution=one.solution, bound=None, near=True, searched=False
        )


def merged_meshes(mesh: Mesh) -> Iterator[tuple[Mesh, tuple[int, ...]]]:
    """Every mesh with two neighbouring axes merged; with it, for each axis of `mesh`, its axis in the merged mesh."""
    for k in range(len(mesh.axes) - 1):
        (name, one), (_, other) = mesh.axes[k : k + 2]
        merged = Mesh((*mesh.axes[:k], (name, one * other), *mesh.axes[k + 2 :]))
        yield merged, tuple(j if j <= k else j - 1 for j in range(len(mesh.axes)))


def near(on: OnMesh, starts: Sequence[Chosen], also: Sequence[Chosen] = ()) -> Looked:
    """The options of each group that some layer chose in `starts`, and all that differ from those in one axis; plus the options
    chosen in `also`."""
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
    """The best plan on a merged mesh, as choices on the mesh itself; if nothing is within the limit, the one with the least
    peak."""
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
    """The option indices in the problem, which must contain the splits."""
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
    """Whether it is better by enough for another round."""
    (a, a_then), (b, b_then) = order(one.solution, objective), order(other.solution, objective)
    return a < (1 - BETTER) * b or (objective != TIME and a <= b and a_then < (1 - BETTER) * b_then)
