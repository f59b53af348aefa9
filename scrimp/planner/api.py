"""`scrimp.plan`: from a model, a batch and a cluster to where every tensor is."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from scrimp.capture import Graph, capture
from scrimp.cluster import Cluster
from scrimp.errors import FitError, PlanError, PlanWarning
from scrimp.layout import Mesh
from scrimp.ledger import parse_nbytes
from scrimp.planner._answer import answered
from scrimp.planner._assemble import Assembly
from scrimp.planner._deadline import Deadline
from scrimp.planner._devices import stage_cluster, whole_mesh
from scrimp.planner._host_tier import host_tier
from scrimp.planner._layers import Layers, OnMesh
from scrimp.planner._micro import micro_batch, rows_of
from scrimp.planner._near import Ask, Best, best_known_on, best_on, bound_of, order
from scrimp.planner._pipeline import schedules, staged_plan
from scrimp.planner._plan import Plan
from scrimp.planner._problem import Problem
from scrimp.planner._question import batch_that_no_axis_divides, check_question
from scrimp.planner._solve import MEMORY, REDUNDANCY, TIME, Solution
from scrimp.planner._states import Precision, accumulating, precision_of
from scrimp.planner._ways import WAYS
from scrimp.planner._whole import costs_of_whole

Say = Callable[[str], None]
_SEARCH = 0.9  # the part of the time for searching; the rest is for the bound of the best


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a plan was made from, for who wants to know more."""

    graph: Graph
    assembly: Assembly
    problem: Problem
    solution: Solution
    near: bool = False  # there were too many ways to split for all of them to be in the problem
    searched: bool = False  # the mesh was not given
    again: Callable[..., Plan] | None = None  # the same model with other settings: `plan_graph` but for what is changed


def plan(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    cluster: Cluster | str,
    *,
    mesh: Mesh | str | None = None,
    budget: int | str | None = None,
    objective: str = MEMORY,
    optimizer: str = "adamw",
    precision: str = "bf16",
    saving: Sequence[str] = WAYS,
    stages: int | str = 1,
    micro_batches: int | str = 1,
    interleave: int = 1,
    seconds: float = 60.0,
    gap: float = 0.01,
    progress: Say | None = None,
) -> Plan:
    """The sharding of every operator. `model` may be on meta, and gives a loss; `example_inputs`: a batch of all devices
    together, as the model takes it, by position or by name. `cluster`: one, or the name of a preset. `mesh`: searched unless
    given. `budget`: bytes of a device that may be used, as many as it has if not given. `objective`: "memory", the least peak,
    then the least time; "time", the least time within the budget; "redundancy", the fewest bytes that are there more than once.

    `saving`: what may become of what the forward saves for the backward: "keep", "recompute", "offload".

    `stages`: the devices in so many equal parts, each with some of the layers, one after the other; the mesh is then that of a
    stage. `micro_batches`: equal parts of the batch, whose gradients are summed up. Of both "auto" tries a few. `interleave`: so
    many pieces of the model a stage, which makes devices wait less and hold more.

    `seconds`: for the search, after the model was captured. Known parallelisms are compared even if that takes longer, and the
    plan is never worse than the best of them. `gap`: what is good enough. `progress` is told what is being done, and how far
    the search is."""
    start, say = time.perf_counter(), progress or (lambda words: None)
    check_question(
        model=model, example_inputs=example_inputs, cluster=cluster, mesh=mesh, objective=objective, optimizer=optimizer,
        precision=precision, saving=saving, seconds=seconds, gap=gap,
    )  # fmt: skip
    numbers = precision_of(precision, optimizer)
    assert numbers is not None  # both names are known
    cluster = Cluster.preset(cluster) if isinstance(cluster, str) else cluster
    # Say what is wrong before anything takes long.
    devices = 1 if cluster.hardware is None else cluster.hardware.devices
    tries = schedules(stages, micro_batches, interleave, devices, rows_of(example_inputs))
    for count in dict.fromkeys(count for count, _ in tries):
        if count > 1:
            _meshes(stage_cluster(cluster, count)[0], mesh, f"a stage (one of {count})")
        else:
            _meshes(cluster, mesh)
    limit_of(cluster, budget)
    graphs: dict[int, Graph] = {}
    found: list[Plan] = []
    troubles: list[FitError] = []
    for micro in dict.fromkeys(micro for _, micro in tries):
        say("capturing the model")
        graphs[micro] = captured(model, micro_batch(example_inputs, micro), numbers)
    deadline = Deadline.after(seconds)
    for k, (count, micro) in enumerate(tries):
        settings: dict[str, Any] = {
            "mesh": mesh, "budget": budget, "objective": objective, "saving": saving, "gap": gap, "progress": progress,
            "seconds": deadline.left() / (len(tries) - k),
        }  # fmt: skip
        try:
            if count == micro == 1:
                found.append(plan_graph(graphs[1], cluster, numbers, optimizer, **settings))
            else:
                found.append(_staged(graphs[micro], cluster, numbers, optimizer, (count, micro, interleave), **settings))
        except FitError as error:
            troubles.append(error)
    made = _best(found, troubles, objective)
    uneven = batch_that_no_axis_divides(next(iter(graphs.values())), made.mesh)
    for words in (*map(str, made.costly), *([uneven] if uneven else [])):
        warnings.warn(words, PlanWarning, stacklevel=2)
    return replace(made, spent_seconds=time.perf_counter() - start)


def _staged(
    graph: Graph, cluster: Cluster, precision: Precision, optimizer: str, schedule: tuple[int, int, int], *,
    mesh: Mesh | str | None, budget: int | str | None, objective: str, saving: Sequence[str], seconds: float, gap: float,
    progress: Say | None,
) -> Plan:  # fmt: skip
    """With stages, micro-batches, or both: the best of all meshes of a stage."""
    deadline, say, (count, micro, interleave) = Deadline.after(seconds), progress or (lambda words: None), schedule
    part, links = stage_cluster(cluster, count) if count > 1 else (cluster, (cluster.default,))
    meshes, layers = _meshes(part, mesh), Layers(graph)
    found: list[Plan] = []
    troubles: list[FitError] = []
    for k, each in enumerate(meshes):
        say(f"planning on the mesh {each}, {count} stages, {micro} micro-batches")
        assembly = OnMesh(layers, part, each).assembly(accumulating(precision) if micro > 1 else precision, saving)
        try:
            one = staged_plan(
                assembly, cluster, links, optimizer=optimizer, objective=objective, limit=limit_of(cluster, budget),
                micro_batches=micro, interleave=interleave, deadline=deadline.part(1 / (len(meshes) - k)), gap=gap, ways=saving,
                work=part.on(each).compute_seconds, say=say,
            )  # fmt: skip
            found.append(one)
        except FitError as error:
            words = host_tier(graph, cluster, precision, limit_of(cluster, budget))
            troubles.append(FitError(f"{error}{words}", least_nbytes=error.least_nbytes))
    return _best(found, troubles, objective)


def plan_graph(
    graph: Graph, cluster: Cluster, precision: Precision, optimizer: str, *, mesh: Mesh | str | None, budget: int | str | None,
    objective: str, saving: Sequence[str], seconds: float, gap: float, progress: Say | None = None,
) -> Plan:  # fmt: skip
    """Of what has been captured."""
    start, say, deadline = time.perf_counter(), progress or (lambda words: None), Deadline.after(seconds)
    meshes, limit, layers = _meshes(cluster, mesh), limit_of(cluster, budget), Layers(graph)
    ask = Ask(
        precision=precision, ways=saving, objective=objective, limit_nbytes=limit, gap=gap, deadline=deadline, say=say
    )  # fmt: skip
    found: list[Best] = []
    late: list[Mesh] = []
    troubles: list[FitError] = []
    for k, each in enumerate(meshes):
        say(f"planning on the mesh {each}")
        mine = replace(ask, deadline=deadline.part(_SEARCH / (len(meshes) - k)))
        look = best_known_on if found and deadline.passed else best_on
        try:
            one = look(layers, cluster, each, mine)
        except FitError as error:
            few = f", the nearest of {len(meshes)}" if len(meshes) > 1 else ""
            words = f"on the mesh {each}{few}: {error}{host_tier(graph, cluster, precision, limit)}"
            troubles.append(FitError(words, least_nbytes=error.least_nbytes))
            continue
        if one is None or not one.searched:
            late.append(each)
        if one is not None:
            found.append(one)
    if not found:
        raise _nearest(troubles)
    best = min(found, key=lambda one: order(one.solution, objective))
    settings: dict[str, Any] = {
        "cluster": cluster, "precision": precision, "optimizer": optimizer, "mesh": mesh, "budget": budget,
        "objective": objective, "saving": saving, "seconds": seconds, "gap": gap,
    }  # fmt: skip
    made = _planned(best, layers, cluster, ask, optimizer)
    asked = replace(made.asked, searched=mesh is None, again=partial(plan_graph, graph, **settings))
    return replace(made, late=tuple(map(str, late)), spent_seconds=time.perf_counter() - start, asked=asked)


def captured(model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any], precision: Precision) -> Graph:
    """With weights of the precision, none of which are made."""
    dtype = getattr(torch, precision.dtype)

    def cast(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    if isinstance(example_inputs, Mapping):
        return capture(_stand_in(model, dtype), (), {name: cast(item) for name, item in example_inputs.items()})
    return capture(_stand_in(model, dtype), tuple(map(cast, example_inputs)))


def _planned(best: Best, layers: Layers, cluster: Cluster, ask: Ask, optimizer: str) -> Plan:
    assembly, problem, solution, mesh = best.assembly, best.problem, best.solution, best.on.mesh
    value, bound = order(solution, ask.objective)[0], best.bound
    every = bound_of(best.on, ask, ask.deadline) if bound is None or (ask.objective == MEMORY and not best.near) else bound
    bound = every if bound is None else bound
    made = Plan(
        mesh=mesh,
        cluster=cluster.to_json(),
        precision=ask.precision.name,
        optimizer=optimizer,
        objective=ask.objective,
        **answered(assembly, solution),
        bound_nbytes=int(every) if ask.objective == MEMORY else 0,
        whole=costs_of_whole(assembly, problem, solution, cluster.on(mesh).compute_seconds),
        asked=Asked(graph=layers.graph, assembly=assembly, problem=problem, solution=solution, near=best.near),
    )
    return replace(made, gap=max(value - bound, 0.0) / value)


def _best(found: Sequence[Plan], troubles: Sequence[FitError], objective: str) -> Plan:
    if not found:
        raise _nearest(troubles)
    return min(found, key=lambda one: _order(one, objective))


def _nearest(troubles: Sequence[FitError]) -> FitError:
    """If nothing fits: the trouble of that which was nearest."""
    return min(troubles, key=lambda error: error.least_nbytes or inf)


def _order(one: Plan, objective: str) -> tuple[float, float]:
    first = {MEMORY: one.memory.peak_nbytes, REDUNDANCY: one.held_nbytes}.get(objective, one.seconds)
    return first, one.memory.peak_nbytes if objective == TIME else one.seconds


def _meshes(cluster: Cluster, mesh: Mesh | str | None, where: str = "the cluster") -> tuple[Mesh, ...]:
    if mesh is None:
        return cluster.meshes(max_axes=2)
    return (whole_mesh(cluster, mesh, where),)


def limit_of(cluster: Cluster, budget: int | str | None) -> int:
    """Bytes of a device that may be used."""
    if budget is not None:
        limit = parse_nbytes(budget)
        if limit <= 0:
            raise PlanError(f"budget={budget!r}: give a size, such as '24GiB'")
        return limit
    if cluster.hardware is None:
        raise PlanError("this cluster says nothing of its devices: give a budget, or take Cluster.preset('8xH100')")
    return cluster.hardware.device_memory_nbytes


def _stand_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same modules with weights on meta."""
    memo: dict[int, Any] = {}
    tensors: Mapping[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for tensor in tensors.values():
        kept = dtype if tensor.is_floating_point() else tensor.dtype
        empty = torch.empty(tensor.shape, dtype=kept, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)
