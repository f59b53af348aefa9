"""The cost of operators without a sharding rule: every device holds all of their inputs and outputs and does all of their
work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from scrimp.capture import LayerGraph, Op, Value
from scrimp.move import ITEMSIZE
from scrimp.planner.answers.plan import KeptWhole
from scrimp.planner.cost.operator_classes import class_of
from scrimp.planner.formulation.assembly import Assembly
from scrimp.planner.shard.options import Work
from scrimp.planner.solver.problem import Problem
from scrimp.planner.solver.solve import Solution


def costs_of_whole(assembly: Assembly, problem: Problem, solution: Solution, work: Work) -> tuple[KeptWhole, ...]:
    """One entry per operator."""
    found: dict[str, KeptWhole] = {}
    devices = assembly.moves.mesh.size
    moved = _move_seconds(assembly, problem, solution)
    for k, part in enumerate(assembly.parts):
        model = part.model
        without = {member.op: g for g, group in enumerate(model.groups) for member in group.members if not member.ruled}
        for index, g in sorted(without.items()):
            op = model.graph.ops[index]
            nbytes = _nbytes(op, model.values)
            longer = part.count * _longer_seconds(op, model.graph, nbytes, devices, work)
            longer += moved.pop((k, g), 0.0)  # once per group
            known = found.get(op.target)
            found[op.target] = KeptWhole(
                target=op.target,
                where=known.where if known else op.where,
                times=part.count + (known.times if known else 0),
                redundant_nbytes=max(nbytes - nbytes // devices, known.redundant_nbytes if known else 0),
                seconds=longer + (known.seconds if known else 0.0),
            )
    return tuple(found.values())


def _nbytes(op: Op, values: Mapping[str, Value]) -> int:
    """Bytes of the operator's inputs and outputs, each storage once."""
    held: dict[str, int] = {}
    for name in (*op.inputs, *op.outputs):
        if name is not None:
            value = values[name]
            held[value.storage] = max(held.get(value.storage, 0), prod(value.shape) * ITEMSIZE[value.dtype])
    return sum(held.values())


def _longer_seconds(op: Op, graph: LayerGraph, nbytes: int, devices: int, work: Work) -> float:
    """Added seconds compared with an even split over all devices."""
    values = {value.name: value for value in graph.values}
    dtype = max((values[name].dtype for name in (*op.outputs, *op.inputs) if name is not None), key=lambda each: ITEMSIZE[each])
    operators = class_of(op, values)
    return work(op.flops, nbytes, dtype, operators) - work(op.flops / devices, nbytes / devices, dtype, operators)


def _move_seconds(assembly: Assembly, problem: Problem, solution: Solution) -> dict[tuple[int, int], float]:
    """Of each part and group: seconds of resharding its inputs and outputs."""
    node_of = {node: place for place, node in assembly.nodes.items()}
    found: dict[tuple[int, int], float] = {}
    for place, seconds in _edges(node_of, problem, solution):
        found[place] = found.get(place, 0.0) + seconds
    return found


def _edges(
    node_of: Mapping[int, tuple[int, int]], problem: Problem, solution: Solution
) -> Iterator[tuple[tuple[int, int], float]]:
    for edge in problem.edges:
        one, other = edge.nodes
        if one in node_of and other in node_of:
            seconds = edge.seconds[solution.choice[one]][solution.choice[other]]
            yield node_of[one], seconds
            yield node_of[other], seconds
