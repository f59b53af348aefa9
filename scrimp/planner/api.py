"""`scrimp.plan`: chooses the layout of every tensor from a model, an example batch and a cluster."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from scrimp._arguments import KEEP, activations_of, renamed
from scrimp._warnings import warn
from scrimp.capture import Graph, capture, fingerprint
from scrimp.cluster import Cluster
from scrimp.errors import FitError, PlanError, PlanWarning, RunError
from scrimp.layout import Mesh
from scrimp.planner.answers.from_solution import plan_fields
from scrimp.planner.answers.plan import Plan, PlannedModel
from scrimp.planner.answers.unsharded_ops import costs_of_whole
from scrimp.planner.budget import Memory, check_reserve, limit_of, reserved, unfit
from scrimp.planner.cost.zero_levels import Precision, accumulating, precision_of
from scrimp.planner.deadline import Deadline
from scrimp.planner.formulation.assembly import Assembly
from scrimp.planner.formulation.on_mesh import Layers, OnMesh
from scrimp.planner.host_tier import host_tier
from scrimp.planner.mesh.search import Best, Request, best_known_on, best_on, bound_of, order
from scrimp.planner.micro_batches import micro_batch, rows_of
from scrimp.planner.pipeline.plan import schedules, staged_plan
from scrimp.planner.pipeline.stage_devices import stage_cluster, whole_mesh
from scrimp.planner.solver.problem import Problem
from scrimp.planner.solver.solve import MEMORY, REDUNDANCY, TIME, Solution
from scrimp.planner.validate import PlannedOptimizer, batch_that_no_axis_divides, check_request, optimizer_name

Say = Callable[[str], None]


_SEARCH = 0.9  # share of the time limit for the search; the rest is for the lower bound of the best plan


@dataclass(frozen=True, kw_only=True)
class PlanSource:
    """The inputs and the solver result behind a plan: `explain`, `what_if` and `compare` read them."""

    graph: Graph
    assembly: Assembly
    problem: Problem
    solution: Solution
    near: bool = False  # the problem holds a subset of the sharding options, because there were too many
    searched: bool = False  # the planner chose the mesh
    reserve: int | str | None = None  # as given
    again: Callable[..., Plan] | None = None  # `plan_graph` bound to the same model; takes changed settings


@renamed("scrimp.plan", PlanError, budget="memory='24GiB'", saving="activations={'keep', 'recompute'}", seconds="time_limit=60")
def plan(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    cluster: Cluster | str,
    *,
    mesh: Mesh | str | None = None,
    memory: int | str | Memory | None = None,
    reserve: int | str | None = None,
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
    """Chooses the sharding of every operator, minimising peak memory or step time, with a proven optimality gap.

    `model` returns a loss and may be on the meta device. `example_inputs`: the global batch as the model's forward takes it, by
    position or by name. `cluster`: a `Cluster` or the name of a preset. `mesh`: searched unless given. `memory`: budget of one
    device, a size such as "24GiB" or the `Memory` of an engine; by default all of the device's memory. `reserve`: bytes of
    that budget which stay free for what a device needs beside the plan's live storages: None for none, a size such as "2GiB", or
    "auto" for what the cluster's devices need (context, workspace of kernels, allocator, NCCL). `objective`: "memory"
    minimises the peak, then time; "time" minimises time within `memory`; "redundancy" minimises replicated bytes. `optimizer`:
    `AdamW(...)`, `SGD(...)`, "adamw" or "sgd".

    `activations`: what the planner may do with activations saved for the backward: "auto", or a set of "keep", "recompute",
    "offload".

    `stages`: number of pipeline stages, each on an equal part of the devices; the mesh is then the mesh of one stage.
    `micro_batches`: equal parts of the batch, whose gradients are accumulated. "auto" tries a few values of either. `interleave`:
    model chunks per stage (interleaved 1F1B); more chunks shrink the bubble and raise memory.

    `time_limit`: seconds for the search, after capture. The planner always evaluates the baselines (DDP, ZeRO, Megatron-LM), even
    past the limit, and its plan is never worse than the best of them. `gap`: the search stops at this relative optimality gap.
    `progress` receives one line of text per step of the search.

    >>> import scrimp
    >>> from scrimp import zoo
    >>> batch = zoo.example_batch("gpt-tiny", batch=8)
    >>> plan = scrimp.plan(zoo.build("gpt-tiny", layers=1), batch, "2xCPU", mesh="x=2", time_limit=1)
    >>> plan.memory.peak_nbytes >= plan.bound_nbytes > 0
    True
    """
    start, say = time.perf_counter(), progress or (lambda words: None)
    check_request(
        model=model, example_inputs=example_inputs, cluster=cluster, mesh=mesh, objective=objective, optimizer=optimizer,
        precision=precision, time_limit=time_limit, gap=gap,
    )  # fmt: skip
    ways = activations_of(activations, PlanError)
    if KEEP not in ways:
        raise PlanError(f"activations={activations!r}: '{KEEP}' must be one of them, because some operators allow nothing else")
    kind = str(optimizer_name(optimizer))
    numbers = precision_of(precision, kind)
    assert numbers is not None  # check_request has checked both names
    cluster = Cluster.preset(cluster) if isinstance(cluster, str) else cluster
    # Report wrong arguments before any long work begins.
    devices = 1 if cluster.hardware is None else cluster.hardware.devices
    tries = schedules(stages, micro_batches, interleave, devices, rows_of(example_inputs))
    for count in dict.fromkeys(count for count, _ in tries):
        if count > 1:
            _meshes(stage_cluster(cluster, count)[0], mesh, f"a stage (one of {count})")
        else:
            _meshes(cluster, mesh)
    check_reserve(reserve)
    limit_of(cluster, memory, reserve)
    graphs: dict[int, Graph] = {}
    found: list[Plan] = []
    troubles: list[FitError] = []
    for micro in dict.fromkeys(micro for _, micro in tries):
        say("capturing the model")
        graphs[micro] = captured(model, micro_batch(example_inputs, micro), numbers)
    deadline = Deadline.after(time_limit)
    for k, (count, micro) in enumerate(tries):
        settings: dict[str, Any] = {
            "mesh": mesh, "memory": memory, "reserve": reserve, "objective": objective, "activations": ways, "gap": gap,
            "progress": progress, "time_limit": deadline.left() / (len(tries) - k),
        }  # fmt: skip
        try:
            if count == micro == 1:
                found.append(plan_graph(graphs[1], cluster, numbers, kind, **settings))
            else:
                found.append(_staged(graphs[micro], cluster, numbers, kind, (count, micro, interleave), **settings))
        except FitError as error:
            troubles.append(error)
    made = _best(found, troubles, objective)
    graph = graphs[made.schedule.micro_batches if made.schedule else 1]
    made = replace(made, model=planned_model(graph))
    uneven = batch_that_no_axis_divides(next(iter(graphs.values())), made.mesh)
    for words in (*map(str, made.costly), *([uneven] if uneven else [])):
        warn(words, PlanWarning)
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
    reserve: int | str | None,
    objective: str,
    activations: Sequence[str],
    time_limit: float,
    gap: float,
    progress: Say | None,
) -> Plan:
    """Plans with stages, micro-batches, or both: the best plan over all meshes of a stage."""
    deadline, say, (count, micro, interleave) = Deadline.after(time_limit), progress or (lambda words: None), schedule
    part, links = stage_cluster(cluster, count) if count > 1 else (cluster, (cluster.default,))
    meshes, layers = _meshes(part, mesh), Layers(graph)
    found: list[Plan] = []
    troubles: list[FitError] = []
    for k, each in enumerate(meshes):
        say(f"planning on the mesh {each}, {count} stages, {micro} micro-batches")
        kept = None
        try:
            kept = reserved(cluster, memory, reserve, each, count)
            assembly = OnMesh(layers, part, each).assembly(accumulating(precision) if micro > 1 else precision, activations)
            limit = limit_of(cluster, memory, reserve, each, count)
            one = staged_plan(
                assembly, cluster, links, optimizer=optimizer, objective=objective, limit=limit,
                micro_batches=micro, interleave=interleave, deadline=deadline.part(1 / (len(meshes) - k)), gap=gap,
                ways=activations, work=part.on(each).compute_seconds, say=say,
            )  # fmt: skip
            found.append(replace(one, reserve=kept))
        except FitError as error:
            told = unfit(error, kept, cluster, reserve, each, count)
            words = host_tier(graph, cluster, precision, limit_of(cluster, memory))
            troubles.append(FitError(f"{told}{words}", least_nbytes=told.least_nbytes))
    return _best(found, troubles, objective)


def plan_graph(
    graph: Graph,
    cluster: Cluster,
    precision: Precision,
    optimizer: str,
    *,
    mesh: Mesh | str | None,
    memory: int | str | Memory | None,
    reserve: int | str | None = None,
    objective: str,
    activations: Sequence[str],
    time_limit: float,
    gap: float,
    progress: Say | None = None,
) -> Plan:
    """Plans a captured graph on the given mesh, or on every mesh of the cluster."""
    start, say, deadline = time.perf_counter(), progress or (lambda words: None), Deadline.after(time_limit)
    meshes, budget, layers = _meshes(cluster, mesh), limit_of(cluster, memory), Layers(graph)
    request = Request(
        precision=precision, ways=activations, objective=objective, limit_nbytes=budget, gap=gap, deadline=deadline, say=say
    )  # fmt: skip
    found: list[Best] = []
    late: list[Mesh] = []
    troubles: list[FitError] = []
    for k, each in enumerate(meshes):
        say(f"planning on the mesh {each}")
        look, kept = best_known_on if found and deadline.passed else best_on, None
        try:
            kept = reserved(cluster, memory, reserve, each)
            limit = limit_of(cluster, memory, reserve, each)
            mine = replace(request, limit_nbytes=limit, deadline=deadline.part(_SEARCH / (len(meshes) - k)))
            one = look(layers, cluster, each, mine)
        except FitError as error:
            few = f", the nearest of {len(meshes)}" if len(meshes) > 1 else ""
            told = unfit(error, kept, cluster, reserve, each)
            words = f"on the mesh {each}{few}: {told}{host_tier(graph, cluster, precision, budget)}"
            troubles.append(FitError(words, least_nbytes=told.least_nbytes))
            continue
        if one is None or not one.searched:
            late.append(each)
        if one is not None:
            found.append(one)
    if not found:
        raise _nearest(troubles)
    best = min(found, key=lambda one: order(one.solution, objective))
    settings: dict[str, Any] = {
        "cluster": cluster, "precision": precision, "optimizer": optimizer, "mesh": mesh, "memory": memory, "reserve": reserve,
        "objective": objective, "activations": activations, "time_limit": time_limit, "gap": gap,
    }  # fmt: skip
    chosen = best.on.mesh
    limited = replace(request, limit_nbytes=limit_of(cluster, memory, reserve, chosen))
    made = replace(_planned(best, layers, cluster, limited, optimizer), reserve=reserved(cluster, memory, reserve, chosen))
    source = replace(made.source, searched=mesh is None, reserve=reserve, again=partial(plan_graph, graph, **settings))
    return replace(made, late=tuple(map(str, late)), spent_seconds=time.perf_counter() - start, source=source)


def captured(model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any], precision: Precision) -> Graph:
    """Captures the model with weights cast to `precision`; all weights are on meta, so none is allocated."""
    dtype = getattr(torch, precision.dtype)

    def cast(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    if isinstance(example_inputs, Mapping):
        return capture(_on_meta(model, dtype), (), {name: cast(item) for name, item in example_inputs.items()})
    return capture(_on_meta(model, dtype), tuple(map(cast, example_inputs)))


def captured_for(plan: Plan, model: nn.Module) -> Graph:
    """The model, captured as for the plan: with tensors of the shapes and dtypes that the plan names, by keyword. A batch with
    nested tensors is known only to the process that made the plan, and so is its graph: that is not made anew."""
    precision = precision_of(plan.precision, plan.optimizer)
    if precision is None or any("." in each.name for each in plan.batch):
        if plan.source is not None:
            graph: Graph = plan.source.graph
            return graph
        names = ", ".join(each.name for each in plan.batch)
        raise RunError(f"the plan's batch has {names}: a plan file can only be run with tensors that the model takes by keyword")
    given = {each.name: torch.empty(each.shape, dtype=getattr(torch, each.dtype), device="meta") for each in plan.batch}
    return captured(model, given, precision)


def planned_model(graph: Graph) -> PlannedModel:
    return PlannedModel(graph=fingerprint(graph), torch=torch.__version__.partition("+")[0])


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
    """The error of the attempt whose peak came nearest to the limit."""
    return min(troubles, key=lambda error: error.least_nbytes or inf)


def _order(one: Plan, objective: str) -> tuple[float, float]:
    first = {MEMORY: one.memory.peak_nbytes, REDUNDANCY: one.held_nbytes}.get(objective, one.seconds)
    return first, one.memory.peak_nbytes if objective == TIME else one.seconds


def _meshes(cluster: Cluster, mesh: Mesh | str | None, where: str = "the cluster") -> tuple[Mesh, ...]:
    if mesh is None:
        return cluster.meshes(max_axes=2)
    return (whole_mesh(cluster, mesh, where),)


def _on_meta(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of the model whose parameters and buffers are on meta, with the dtypes that the engine gives them: parameters in
    `dtype`, unless their module keeps running statistics; buffers as they are."""
    memo: dict[int, Any] = {}
    wide = {id(own) for module in model.modules() if _keeps_statistics(module) for own in module.parameters(recurse=False)}
    tensors: Mapping[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for tensor in tensors.values():
        cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and id(tensor) not in wide
        kept = dtype if cast else tensor.dtype
        empty = torch.empty(tensor.shape, dtype=kept, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def _keeps_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None
