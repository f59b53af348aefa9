"""`scrimp.plan`: from a model, a batch and a cluster to where every tensor is."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, Protocol

import torch
from torch import nn

from scrimp._arguments import activations_of, renamed
from scrimp.capture import Graph, capture
from scrimp.cluster import Cluster
from scrimp.errors import FitError, PlanError, PlanWarning
from scrimp.layout import Mesh
from scrimp.ledger import parse_nbytes
from scrimp.planner.answers.from_solution import plan_fields
from scrimp.planner.answers.plan import Plan
from scrimp.planner.answers.unsharded_ops import costs_of_whole
from scrimp.planner.build.assembly import Assembly
from scrimp.planner.build.on_mesh import Layers, OnMesh
from scrimp.planner.cost.activation_policy import KEEP
from scrimp.planner.cost.zero_levels import Precision, accumulating, precision_of
from scrimp.planner.deadline import Deadline
from scrimp.planner.host_tier import host_tier
from scrimp.planner.mesh.search import Best, Request, best_known_on, best_on, bound_of, order
from scrimp.planner.micro_batches import micro_batch, rows_of
from scrimp.planner.pipeline.plan import schedules, staged_plan
from scrimp.planner.pipeline.stage_devices import stage_cluster, whole_mesh
from scrimp.planner.solver.problem import Problem
from scrimp.planner.solver.solve import MEMORY, REDUNDANCY, TIME, Solution
from scrimp.planner.validate import PlannedOptimizer, batch_that_no_axis_divides, check_request, optimizer_name

Say = Callable[[str], None]


class Memory(Protocol):
    """The part of an engine's `Memory` that a plan reads."""

    @property
    def device(self) -> int | str: ...


_SEARCH = 0.9  # the part of the time for searching; the rest is for the bound of the best


@dataclass(frozen=True, kw_only=True)
class PlanSource:
    """What a plan was made from, for who wants to know more."""

    graph: Graph
    assembly: Assembly
    problem: Problem
    solution: Solution
    near: bool = False  # there were too many ways to split for all of them to be in the problem
    searched: bool = False  # the mesh was not given
    again: Callable[..., Plan] | None = None  # the same model with other settings: `plan_graph` but for what is changed


@renamed("scrimp.plan", PlanError, budget="memory='24GiB'", saving="activations={'keep', 'recompute'}", seconds="time_limit=60")
def plan(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    cluster: Cluster | str,
    *,
    mesh: Mesh | str | None = None,
    memory: int | str | Memory | None = None,
    objective: str = MEMORY,
    optimizer: str | PlannedOptimizer = "adamw",
    precision: str = "bf16",
    activations: str | Iterable[str] = "auto",
    stages: int | str = 1,
    micro_batches: int | str = 1,
    interleave: int = 1,
    time_limit: float = 60.0,
    gap: float = 0.01,
    progress: Say | None = None,
) -> Plan:
    """The sharding of every operator. `model` may be on meta, and gives a loss; `example_inputs`: a batch of all devices
    together, as the model takes it, by position or by name. `cluster`: one, or the name of a preset. `mesh`: searched unless
    given. `memory`: of a device, a size such as "24GiB" or the `Memory` of an engine; all of it if not given. `objective`:
    "memory", the least peak, then the least time; "time", the least time within `memory`; "redundancy", the fewest bytes that
    are there more than once. `optimizer`: `AdamW(...)`, `SGD(...)`, "adamw" or "sgd".

    `activations`: what the planner may do with what the forward saves for the backward: "auto", or a set of "keep",
    "recompute", "offload".

    `stages`: the devices in so many equal parts, each with some of the layers, one after the other; the mesh is then that of a
    stage. `micro_batches`: equal parts of the batch, whose gradients are summed up. Of both "auto" tries a few. `interleave`: so
    many pieces of the model a stage, which makes devices wait less and hold more.

    `time_limit`: seconds for the search, after the model was captured. Known parallelisms are compared even if that takes
    longer, and the plan is never worse than the best of them. `gap`: what is good enough. `progress` is told what is being
    done, and how far the search is."""
    start, say = time.perf_counter(), progress or (lambda words: None)
    check_request(
        model=model, example_inputs=example_inputs, cluster=cluster, mesh=mesh, objective=objective, optimizer=optimizer,
        precision=precision, time_limit=time_limit, gap=gap,
    )  # fmt: skip
    ways = activations_of(activations, PlanError)
    if KEEP not in ways:
        raise PlanError(f"activations={activations!r}: '{KEEP}' must be one of them, because some operators can do nothing else")
    kind = str(optimizer_name(optimizer))
    numbers = precision_of(precision, kind)
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
    limit_of(cluster, memory)
    graphs: dict[int, Graph] = {}
    found: list[Plan] = []
    troubles: list[FitError] = []
    for micro in dict.fromkeys(micro for _, micro in tries):
        say("capturing the model")
        graphs[micro] = captured(model, micro_batch(example_inputs, micro), numbers)
    deadline = Deadline.after(time_limit)
    for k, (count, micro) in enumerate(tries):
        settings: dict[str, Any] = {
            "mesh": mesh, "memory": memory, "objective": objective, "activations": ways, "gap": gap, "progress": progress,
            "time_limit": deadline.left() / (len(tries) - k),
        }  # fmt: skip
        try:
            if count == micro == 1:
                found.append(plan_graph(graphs[1], cluster, numbers, kind, **settings))
            else:
                found.append(_staged(graphs[micro], cluster, numbers, kind, (count, micro, interleave), **settings))
        except FitError as error:
            troubles.append(error)
    made = _best(found, troubles, objective)
    uneven = batch_that_no_axis_divides(next(iter(graphs.values())), made.mesh)
    for words in (*map(str, made.costly), *([uneven] if uneven else [])):
        warnings.warn(words, PlanWarning, stacklevel=2)
    return replace(made, spent_seconds=time.perf_counter() - start)


def _staged(
    graph: Graph,
    cluster: Cluster,
    precision: Precision,
    optimizer: str,
    schedule: tuple[int, int, int],
    *,
    mesh: Mesh | str | None,
    memory: int | str | Memory | None,
    objective: str,
    activations: Sequence[str],
    time_limit: float,
    gap: float,
    progress: Say | None,
) -> Plan:
    """With stages, micro-batches, or both: the best of all meshes of a stage."""
    deadline, say, (count, micro, interleave) = Deadline.after(time_limit), progress or (lambda words: None), schedule
    part, links = stage_cluster(cluster, count) if count > 1 else (cluster, (cluster.default,))
    meshes, layers = _meshes(part, mesh), Layers(graph)
    found: list[Plan] = []
    troubles: list[FitError] = []
    for k, each in enumerate(meshes):
        say(f"planning on the mesh {each}, {count} stages, {micro} micro-batches")
        assembly = OnMesh(layers, part, each).assembly(accumulating(precision) if micro > 1 else precision, activations)
        try:
            one = staged_plan(
                assembly, cluster, links, optimizer=optimizer, objective=objective, limit=limit_of(cluster, memory),
                micro_batches=micro, interleave=interleave, deadline=deadline.part(1 / (len(meshes) - k)), gap=gap,
                ways=activations, work=part.on(each).compute_seconds, say=say,
            )  # fmt: skip
            found.append(one)
        except FitError as error:
            words = host_tier(graph, cluster, precision, limit_of(cluster, memory))
            troubles.append(FitError(f"{error}{words}", least_nbytes=error.least_nbytes))
    return _best(found, troubles, objective)


def plan_graph(
    graph: Graph,
    cluster: Cluster,
    precision: Precision,
    optimizer: str,
    *,
    mesh: Mesh | str | None,
    memory: int | str | Memory | None,
    objective: str,
    activations: Sequence[str],
    time_limit: float,
    gap: float,
    progress: Say | None = None,
) -> Plan:
    """Of what has been captured."""
    start, say, deadline = time.perf_counter(), progress or (lambda words: None), Deadline.after(time_limit)
    meshes, limit, layers = _meshes(cluster, mesh), limit_of(cluster, memory), Layers(graph)
    request = Request(
        precision=precision, ways=activations, objective=objective, limit_nbytes=limit, gap=gap, deadline=deadline, say=say
    )  # fmt: skip
    found: list[Best] = []
    late: list[Mesh] = []
    troubles: list[FitError] = []
    for k, each in enumerate(meshes):
        say(f"planning on the mesh {each}")
        mine = replace(request, deadline=deadline.part(_SEARCH / (len(meshes) - k)))
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
        "cluster": cluster, "precision": precision, "optimizer": optimizer, "mesh": mesh, "memory": memory,
        "objective": objective, "activations": activations, "time_limit": time_limit, "gap": gap,
    }  # fmt: skip
    made = _planned(best, layers, cluster, request, optimizer)
    source = replace(made.source, searched=mesh is None, again=partial(plan_graph, graph, **settings))
    return replace(made, late=tuple(map(str, late)), spent_seconds=time.perf_counter() - start, source=source)


def captured(model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any], precision: Precision) -> Graph:
    """With weights of the precision, none of which are made."""
    dtype = getattr(torch, precision.dtype)

    def cast(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    if isinstance(example_inputs, Mapping):
        return capture(_stand_in(model, dtype), (), {name: cast(item) for name, item in example_inputs.items()})
    return capture(_stand_in(model, dtype), tuple(map(cast, example_inputs)))


def _planned(best: Best, layers: Layers, cluster: Cluster, request: Request, optimizer: str) -> Plan:
    assembly, problem, solution, mesh = best.assembly, best.problem, best.solution, best.on.mesh
    value, bound = order(solution, request.objective)[0], best.bound
    every = (
        bound_of(best.on, request, request.deadline)
        if bound is None or (request.objective == MEMORY and not best.near)
        else bound
    )
    bound = every if bound is None else bound
    made = Plan(
        mesh=mesh,
        cluster=cluster.to_json(),
        precision=request.precision.name,
        optimizer=optimizer,
        objective=request.objective,
        **plan_fields(assembly, solution),
        bound_nbytes=int(every) if request.objective == MEMORY else 0,
        whole=costs_of_whole(assembly, problem, solution, cluster.on(mesh).compute_seconds),
        source=PlanSource(graph=layers.graph, assembly=assembly, problem=problem, solution=solution, near=best.near),
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


def limit_of(cluster: Cluster, memory: int | str | Memory | None) -> int:
    """Bytes of a device that may be used. `memory`: a size, or the `Memory` of an engine, whose device counts here."""
    size = memory if memory is None or isinstance(memory, (int, str)) else memory.device
    if size not in (None, "auto"):
        assert size is not None
        limit = parse_nbytes(size)
        if limit <= 0:
            raise PlanError(f"memory={memory!r}: give a size, such as '24GiB'")
        return limit
    if cluster.hardware is None:
        raise PlanError("this cluster does not say what its devices have: give memory='24GiB', or take Cluster.preset('8xH100')")
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
