"""Finds the operator groups behind a name: of a weight, of a module, of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from scrimp.capture import Graph, Op
from scrimp.errors import PlanError
from scrimp.planner.formulation.assembly import Assembly

Where = tuple[int, int]  # a part and a group in it

_NEAR = 6  # how many known names an error message suggests


def find(assembly: Assembly, name: str) -> tuple[Where, ...]:
    """Raises `PlanError` with similar names if the name is unknown."""
    known = known_names(assembly)
    if name in known:
        return tuple(known[name])
    near = dict.fromkeys([*get_close_matches(name, known, _NEAR, 0.6), *(other for other in known if name and name in other)])
    words = f"; did you mean {', '.join([*near][:_NEAR])}?" if near else f"; there are {', '.join([*known][:_NEAR])}, ..."
    raise PlanError(f"the plan has no weight, module or layer '{name}'{words}")


def known_names(assembly: Assembly) -> dict[str, dict[Where, None]]:
    """All names: each weight maps to the group that holds it at rest; each module, up to its layer, to the groups whose main
    operator is in it, or, if there are none, to those with any operator in it."""
    found: dict[str, dict[Where, None]] = {}
    follow: dict[str, dict[Where, None]] = {}
    weights: dict[str, Where] = {}
    for index, layer in enumerate(assembly.graph.layers):
        k = assembly.part_of[index]
        model = assembly.parts[k].model
        for g in range(len(model.groups)):
            main, ops = main_op(assembly, (k, g)), ops_of(assembly, (k, g))
            for op in ops:
                for name in _modules(assembly.graph, index, op):
                    (found if op is main else follow).setdefault(name, {})[k, g] = None
        for name, full in layer.parameters:
            if name in model.weights:
                weights.setdefault(full, (k, model.uses[name][0].group))  # a tied weight belongs to its first use
    return {**follow, **found, **{name: {where: None} for name, where in weights.items()}}


def ops_of(assembly: Assembly, where: Where) -> list[Op]:
    """The group's forward operators, or all of them if it has none in the forward."""
    model = assembly.parts[where[0]].model
    ops = [model.graph.ops[member.op] for member in model.groups[where[1]].members]
    return [op for op in ops if not op.backward] or ops


def main_op(assembly: Assembly, where: Where) -> Op:
    """The operator with the most FLOPs."""
    return max(ops_of(assembly, where), key=lambda op: op.flops)


def path_of(graph: Graph, layer: int, op: Op) -> str:
    """The module path of an operator in a layer. Identical layers share one graph, which has the module paths of one of them."""
    module = op.where.partition(", ")[0]
    here = graph.layers[layer]
    for other in graph.layers:
        if other.graph == here.graph and other.path and f"{module}.".startswith(f"{other.path}."):
            return here.path + module.removeprefix(other.path)
    return module


def _modules(graph: Graph, layer: int, op: Op) -> Iterator[str]:
    path, top = path_of(graph, layer, op), graph.layers[layer].path
    while path:
        yield path
        if path == top:
            return
        path = path.rpartition(".")[0]
        if top and not f"{path}.".startswith(f"{top}."):
            return
