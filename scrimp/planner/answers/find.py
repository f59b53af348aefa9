"""Which choices a name stands for: of a weight, of a module, of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from scrimp.capture import Graph, Op
from scrimp.errors import PlanError
from scrimp.planner.build.assembly import Assembly

Where = tuple[int, int]  # a part and a group in it

_NEAR = 6  # names that are offered in place of one that is not known


def find(assembly: Assembly, name: str) -> tuple[Where, ...]:
    """`PlanError` with names that look like it, if there is none such."""
    known = known_names(assembly)
    if name in known:
        return tuple(known[name])
    near = dict.fromkeys([*get_close_matches(name, known, _NEAR, 0.6), *(other for other in known if name and name in other)])
    words = f"; did you mean {', '.join([*near][:_NEAR])}?" if near else f"; there are {', '.join([*known][:_NEAR])}, ..."
    raise PlanError(f"the plan has no weight, module or layer '{name}'{words}")


def known_names(assembly: Assembly) -> dict[str, dict[Where, None]]:
    """Of each weight the group that has it at rest; of each module, up to the layer's own, those that have their main operator
    in it, or, if there are none, any operator."""
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
                weights.setdefault(full, (k, model.uses[name][0].group))  # one that is tied is where it is used first
    return {**follow, **found, **{name: {where: None} for name, where in weights.items()}}


def ops_of(assembly: Assembly, where: Where) -> list[Op]:
    """Of a group, those of the forward if it has any."""
    model = assembly.parts[where[0]].model
    ops = [model.graph.ops[member.op] for member in model.groups[where[1]].members]
    return [op for op in ops if not op.backward] or ops


def main_op(assembly: Assembly, where: Where) -> Op:
    """The one with the most work."""
    return max(ops_of(assembly, where), key=lambda op: op.flops)


def path_of(graph: Graph, layer: int, op: Op) -> str:
    """The module of an operator in a layer. Layers that are alike share operators, and those know one of the layers' modules."""
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
