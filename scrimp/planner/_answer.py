"""From the numbers of a solution back to a plan."""

from __future__ import annotations

from collections.abc import Iterator

from scrimp.planner._assemble import Assembly
from scrimp.planner._options import Option
from scrimp.planner._plan import Kind, PlannedLayers, PlannedMemory, PlannedOp, PlannedWeight
from scrimp.planner._sketch import Sketch
from scrimp.planner._solve import Solution
from scrimp.planner._stack import Part
from scrimp.planner._states import GRADIENTS, STATES, WEIGHTS, levels


def memory_of(assembly: Assembly, solution: Solution) -> PlannedMemory:
    return memory_at(assembly.sketch, assembly.moves.mesh.size, solution, where_of(assembly, solution.point))


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
            first=part.first,
            count=part.count,
            ops=tuple(_ops(assembly, solution, k, part)),
            weights=tuple(_weights(assembly, solution, k, part)),
        )


def _ops(assembly: Assembly, solution: Solution, k: int, part: Part) -> Iterator[PlannedOp]:
    model = part.model
    chosen = {g: _option(assembly, solution, k, g) for g in range(len(model.groups))}
    of_op = {member.op: g for g, group in enumerate(model.groups) for member in group.members}
    for index, op in enumerate(model.graph.ops):
        option = chosen[of_op[index]]
        inputs = (option.made[name].complete() if name in option.made else option.needed[name] for name in op.inputs)
        yield PlannedOp(
            name=op.name,
            target=op.target,
            saved=assembly.ways[k, of_op[index]].way_of(solution.choice[assembly.nodes[k, of_op[index]]]),
            inputs=tuple(map(str, inputs)),
            outputs=tuple(str(option.made[name]) if name in option.made else None for name in op.outputs if name is not None),
        )


def _option(assembly: Assembly, solution: Solution, k: int, group: int) -> Option:
    split = assembly.ways[k, group].split_of(solution.choice[assembly.nodes[k, group]])
    return assembly.parts[k].model.options[group][split]


def _weights(assembly: Assembly, solution: Solution, k: int, part: Part) -> Iterator[PlannedWeight]:
    model, mesh = part.model, assembly.moves.mesh
    choices = levels(mesh, assembly.precision)
    named = dict(assembly.graph.layers[part.first].parameters)
    for name in model.weights:
        group = model.uses[name][0].group
        option = _option(assembly, solution, k, group)
        place = option.needed[name]
        level = dict.fromkeys(mesh.names, 0)
        if (k, group) in assembly.rest:
            level = dict(zip(mesh.names, choices[solution.choice[assembly.rest[k, group]]], strict=True))
        axes = {
            least: tuple(axis for axis in mesh.names if axis not in place.axes and level[axis] >= least)
            for least in (STATES, GRADIENTS, WEIGHTS)
        }
        yield PlannedWeight(
            name=named[name],
            layout=str(place),
            weight_axes=axes[WEIGHTS],
            gradient_axes=axes[GRADIENTS],
            state_axes=axes[STATES],
        )


def where_of(assembly: Assembly, point: int) -> str:
    for part in assembly.parts:
        if part.again == point:
            return f"{assembly.graph.layers[part.last].path or 'the model'}, its forward run again"
        for index, op in enumerate(part.model.graph.ops):
            if part.point(index) == point:
                return f"{assembly.graph.layers[part.last].path or 'the model'}, {op.target}{', backward' if op.backward else ''}"
    return ""
