"""Translates a solver solution back into a `Plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from scrimp.capture import Graph, Op
from scrimp.layout import Mesh
from scrimp.planner.answers.plan import (
    Kind,
    Plan,
    PlannedGroup,
    PlannedInput,
    PlannedLayers,
    PlannedMemory,
    PlannedOp,
    PlannedWeight,
)
from scrimp.planner.cost.zero_levels import GRADIENTS, STATES, WEIGHTS, axes_at_rest, levels
from scrimp.planner.formulation.assembly import Assembly
from scrimp.planner.formulation.builder import Sketch
from scrimp.planner.shard.layer_runs import Part
from scrimp.planner.shard.options import Option
from scrimp.planner.shard.placement import Placed, unsplit
from scrimp.planner.solver.problem import Problem
from scrimp.planner.solver.solve import Solution


def memory_of(assembly: Assembly, solution: Solution) -> PlannedMemory:
    return memory_at(assembly.sketch, assembly.moves.mesh.size, solution, assembly.sketch.where[solution.point])


def memory_at(sketch: Sketch, devices: int, solution: Solution, where: str) -> PlannedMemory:
    once: dict[str, int] = {}
    for first, last, kind, nbytes in sketch.once:
        if first <= solution.point <= last:
            once[kind] = once.get(kind, 0) + nbytes
    return PlannedMemory(
        peak_nbytes=solution.peak_nbytes,
        kinds=tuple(
            Kind(kind=kind, nbytes=nbytes, redundant_nbytes=max(0, nbytes - once.get(kind, 0) // devices))
            for kind, nbytes in solution.kinds
            if nbytes
        ),
        where=where,
    )


def layers_of(assembly: Assembly, solution: Solution) -> Iterator[PlannedLayers]:
    for k, part in enumerate(assembly.parts):
        yield PlannedLayers(
            path=assembly.graph.layers[part.first].path,
            last=assembly.graph.layers[part.last].path,
            first=part.first,
            count=part.count,
            ops=tuple(_ops(assembly, solution, k, part)),
            groups=tuple(_groups(assembly, solution, k, part)),
            weights=tuple(_weights(assembly, solution, k, part)),
        )


def inputs_of(graph: Graph, chosen: Iterable[tuple[Assembly, Sequence[int]]]) -> tuple[PlannedInput, ...]:
    """Each tensor of the batch, placed as the first group that reads it needs it. `chosen`: the pieces of the model."""
    found: dict[str, Placed] = {}
    for assembly, choice in chosen:
        for k, part in enumerate(assembly.parts):
            for name, source in zip(part.model.borders, assembly.graph.layers[part.first].inputs, strict=True):
                if source.layer is None and source.name not in found and name in part.model.uses:
                    option, _ = option_of(assembly, k, part.model.uses[name][0].group, choice)
                    found[source.name] = option.needed[name]
    return tuple(
        PlannedInput(
            name=value.name, shape=value.shape, dtype=value.dtype, factors=found.get(value.name, unsplit(value.shape)).dims
        )
        for value in graph.batch
    )


def plan_fields(assembly: Assembly, solution: Solution) -> dict[str, Any]:
    """The fields of a `Plan` that follow from the solution."""
    return {
        "memory": memory_of(assembly, solution),
        "seconds": solution.seconds,
        "gap": solution.phases[0].gap,
        "seconds_gap": solution.phases[-1].gap,
        "held_nbytes": solution.held_nbytes,
        "layers": tuple(layers_of(assembly, solution)),
        "batch": inputs_of(assembly.graph, [(assembly, solution.choice)]),
        "spent_seconds": solution.spent_seconds,
    }


def planned_anew(plan: Plan, problem: Problem, solution: Solution, objective: str, again: Callable[..., Plan]) -> Plan:
    """A new plan of the same model on the same mesh from another solution. `again`: see `PlanSource`."""
    source = replace(plan.source, problem=problem, solution=solution, again=again)
    return replace(plan, objective=objective, source=source, **plan_fields(plan.source.assembly, solution))


def option_of(assembly: Assembly, k: int, group: int, choice: Sequence[int]) -> tuple[Option, str]:
    """A group's sharding option, and its activation policy (keep, recompute, offload)."""
    chosen, ways = choice[assembly.nodes[k, group]], assembly.ways[k, group]
    return assembly.parts[k].model.options[group][ways.split_of(chosen)], ways.way_of(chosen)


def level_of(assembly: Assembly, k: int, group: int, choice: Sequence[int]) -> tuple[int, ...]:
    """The group's ZeRO level along each mesh axis."""
    if (k, group) not in assembly.rest:
        return (0,) * len(assembly.moves.mesh.axes)
    return levels(assembly.moves.mesh, assembly.precision)[choice[assembly.rest[k, group]]]


def planned_op(op: Op, option: Option, way: str) -> PlannedOp:
    inputs = (option.made[name].complete() if name in option.made else option.needed[name] for name in op.inputs)
    return PlannedOp(
        name=op.name,
        target=op.target,
        saved=way,
        inputs=tuple(map(str, inputs)),
        outputs=tuple(str(option.made[name]) if name in option.made else None for name in op.outputs if name is not None),
    )


def planned_weight(name: str, place: Placed, mesh: Mesh, level: Sequence[int]) -> PlannedWeight:
    """`place`: sharding in use; `level`: ZeRO level along each axis. Axes that already split the weight add nothing."""
    axes = axes_at_rest(place.axes, tuple(level), mesh)
    return PlannedWeight(
        name=name,
        layout=str(place),
        weight_axes=axes[WEIGHTS],
        gradient_axes=axes[GRADIENTS],
        state_axes=axes[STATES],
    )


def _ops(assembly: Assembly, solution: Solution, k: int, part: Part) -> Iterator[PlannedOp]:
    model = part.model
    chosen = {g: option_of(assembly, k, g, solution.choice) for g in range(len(model.groups))}
    of_op = {member.op: g for g, group in enumerate(model.groups) for member in group.members}
    for index, op in enumerate(model.graph.ops):
        yield planned_op(op, *chosen[of_op[index]])


def _groups(assembly: Assembly, solution: Solution, k: int, part: Part) -> Iterator[PlannedGroup]:
    for g, group in enumerate(part.model.groups):
        option, way = option_of(assembly, k, g, solution.choice)
        level = level_of(assembly, k, g, solution.choice)
        yield PlannedGroup(name=group.name, ops=len(group.members), sizes=group.sizes, split=option.split, saved=way, level=level)


def _weights(assembly: Assembly, solution: Solution, k: int, part: Part) -> Iterator[PlannedWeight]:
    named = dict(assembly.graph.layers[part.first].parameters)
    for name in part.model.weights:
        group = part.model.uses[name][0].group
        option, _ = option_of(assembly, k, group, solution.choice)
        level = level_of(assembly, k, group, solution.choice)
        yield planned_weight(named[name], option.needed[name], assembly.moves.mesh, level)
