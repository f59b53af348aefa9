"""`scrimp.plan`: from a model, a batch and a cluster to where every tensor is."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from scrimp.capture import Graph, capture
from scrimp.cluster import Cluster
from scrimp.errors import FitError, PlanError
from scrimp.layout import Mesh
from scrimp.ledger import format_nbytes, parse_nbytes
from scrimp.planner._answer import layers_of, memory_of
from scrimp.planner._assemble import Assembly, Rates
from scrimp.planner._axiswise import AxisWise
from scrimp.planner._devices import stage_cluster
from scrimp.planner._layer import LayerModel, model_of
from scrimp.planner._micro import micro_batch, rows_of
from scrimp.planner._moves import Moves
from scrimp.planner._pipeline import schedules, staged_plan
from scrimp.planner._plan import Plan
from scrimp.planner._problem import Problem
from scrimp.planner._solve import MEMORY, Solution, solve
from scrimp.planner._stack import parts_of
from scrimp.planner._states import OPTIMIZERS, PRECISIONS, Precision, accumulating, precision_of
from scrimp.planner._ways import KEEP, WAYS
from scrimp.rules import rule_of

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a plan was made from, for who wants to know more."""

    graph: Graph
    assembly: Assembly
    problem: Problem
    solution: Solution


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

    `seconds` and `gap`: when the search is good enough. `progress` is told what is being done."""
    start, say = time.perf_counter(), progress or (lambda words: None)
    numbers = precision_of(precision, optimizer)
    if numbers is None:
        raise PlanError(
            f"precision={precision!r}, optimizer={optimizer!r}: there are {', '.join(PRECISIONS)} and {', '.join(OPTIMIZERS)}"
        )
    if KEEP not in saving or not {*saving} <= {*WAYS}:
        raise PlanError(f"saving={saving!r}: there are {', '.join(WAYS)}, and '{KEEP}' must be one of them")
    cluster = Cluster.preset(cluster) if isinstance(cluster, str) else cluster
    limit = _limit(cluster, budget)
    devices = 1 if cluster.hardware is None else cluster.hardware.devices
    found: list[Plan] = []
    trouble: FitError | None = None
    tries = [
        (count, micro, each)
        for count, micro in schedules(stages, micro_batches, interleave, devices, rows_of(example_inputs))
        for each in _meshes(cluster if count == 1 else stage_cluster(cluster, count)[0], mesh)
    ]
    graphs: dict[int, Graph] = {}
    for k, (count, micro, each) in enumerate(tries):
        if micro not in graphs:
            say("capturing the model")
            graphs[micro] = captured(model, micro_batch(example_inputs, micro), numbers)
        left = max(5.0, (seconds - (time.perf_counter() - start)) / (len(tries) - k))
        say(f"planning on the mesh {each}{f', {count} stages, {micro} micro-batches' if micro > 1 or count > 1 else ''}")
        try:
            if count == micro == 1:
                one, _ = _planned(graphs[1], cluster, each, numbers, optimizer, objective, limit, left, gap, saving)
            else:
                part, links = stage_cluster(cluster, count) if count > 1 else (cluster, (cluster.default,))
                rule = accumulating(numbers) if micro > 1 else numbers
                assembly, whole = assembled(graphs[micro], part, each, rule, saving)
                one = staged_plan(
                    assembly, cluster, links, optimizer=optimizer, objective=objective, limit=limit, micro_batches=micro,
                    interleave=interleave, seconds=left, gap=gap, ways=saving, whole=whole, say=say,
                )  # fmt: skip
            found.append(one)
        except FitError as error:
            trouble = error
    if not found:
        assert trouble is not None
        raise trouble
    best = min(found, key=lambda one: _order(one, objective))
    return replace(best, spent_seconds=time.perf_counter() - start)


def captured(model: nn.Module, example_inputs: Sequence[Any] | Mapping[str, Any], precision: Precision) -> Graph:
    """With weights of the precision, none of which are made."""
    dtype = getattr(torch, precision.dtype)

    def cast(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    if isinstance(example_inputs, Mapping):
        return capture(_stand_in(model, dtype), (), {name: cast(item) for name, item in example_inputs.items()})
    return capture(_stand_in(model, dtype), tuple(map(cast, example_inputs)))


def assembled(
    graph: Graph, cluster: Cluster, mesh: Mesh, precision: Precision, ways: Sequence[str] = WAYS
) -> tuple[Assembly, tuple[str, ...]]:
    """The problem of a mesh, drawn up; and operators without a rule."""
    here = cluster.on(mesh)
    moves = Moves(AxisWise(mesh, here))
    models: list[LayerModel] = []
    whole: dict[str, None] = {}
    for layer in graph.graphs:
        values = {value.name: value for value in layer.values}
        rules = {op.name: rule_of(op, values) for op in layer.ops}
        whole |= {op.target: None for op in layer.ops if rules[op.name] is None}
        models.append(model_of(layer, rules, mesh, here.compute_seconds, moves.seconds))
    hardware = here.hardware
    assert hardware is not None
    rates = Rates(memory=hardware.device_memory * hardware.shares.memory, host_link=hardware.host_link * hardware.shares.link)
    return Assembly(graph, parts_of(graph, models), moves, precision, rates, ways), tuple(whole)


def _planned(
    graph: Graph, cluster: Cluster, mesh: Mesh, precision: Precision, optimizer: str, objective: str, limit: int, seconds: float,
    gap: float, saving: Sequence[str],
) -> tuple[Plan, Solution]:  # fmt: skip
    assembly, whole = assembled(graph, cluster, mesh, precision, saving)
    problem = assembly.sketch.problem(limit)
    solution = solve(problem, objective=objective, seconds=seconds, gap=gap)
    if solution.peak_nbytes > limit:
        raise FitError(
            f"the least memory of any plan on the mesh {mesh} is {format_nbytes(solution.peak_nbytes)} a device, and the budget "
            f"is {format_nbytes(limit)}; give more devices, a smaller batch, or a budget of {format_nbytes(solution.peak_nbytes)}"
        )
    made = Plan(
        mesh=mesh,
        cluster=cluster.to_json(),
        precision=precision.name,
        optimizer=optimizer,
        objective=objective,
        memory=memory_of(assembly, solution),
        seconds=solution.seconds,
        gap=solution.phases[0].gap,
        seconds_gap=solution.phases[-1].gap,
        layers=tuple(layers_of(assembly, solution)),
        whole=whole,
        asked=Asked(graph=graph, assembly=assembly, problem=problem, solution=solution),
    )
    return made, solution


def _order(one: Plan, objective: str) -> tuple[float, float]:
    return (one.memory.peak_nbytes, one.seconds) if objective == MEMORY else (one.seconds, one.memory.peak_nbytes)


def _meshes(cluster: Cluster, mesh: Mesh | str | None) -> tuple[Mesh, ...]:
    if mesh is None:
        return cluster.meshes(max_axes=2)
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    cluster.axis_links(mesh)  # says if it is too large
    return (mesh,)


def _limit(cluster: Cluster, budget: int | str | None) -> int:
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
