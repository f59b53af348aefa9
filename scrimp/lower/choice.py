"""A plan's choices for the layers of a captured model: each operator's rule, split, and placements of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from scrimp.capture import Graph, Op, Value
from scrimp.errors import RunError
from scrimp.layout import Mesh
from scrimp.planner import LayerModel, Layers, Placed, Plan, PlannedGroup, PlannedLayers, kept_whole, placed
from scrimp.rules import FREE, Factor, Rule, bind, rule_of


@dataclass(frozen=True, kw_only=True)
class ChosenOp:
    """`rule`: over the group's atoms; `split`: the axes of each atom. `inputs`: complete placements that it needs; `outputs`:
    those it makes, with the axes along which they are partial sums of its own. `scratch_nbytes`: the most it takes besides;
    `traffic_nbytes`: what it reads and writes besides."""

    op: Op
    group: int
    rule: Rule
    split: tuple[tuple[int, tuple[str, ...]], ...]
    inputs: tuple[Placed, ...]
    outputs: tuple[Placed | None, ...]
    scratch_nbytes: int = 0
    traffic_nbytes: int = 0


@dataclass(frozen=True)
class ChosenLayer:
    """One class of layers with the choices of its groups. Equal ones share a program."""

    model: LayerModel
    groups: tuple[PlannedGroup, ...]
    mesh: Mesh

    @property
    def key(self) -> tuple[Any, ...]:
        return id(self.model), tuple((group.split, group.saved) for group in self.groups)

    @cached_property
    def values(self) -> Mapping[str, Value]:
        return self.model.values

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """The operator that makes each value."""
        return {name: k for k, op in enumerate(self.model.graph.ops) for name in op.outputs if name is not None}

    @cached_property
    def ops(self) -> tuple[ChosenOp, ...]:
        found: dict[int, ChosenOp] = {}
        sizes = dict(self.mesh.axes)
        for g, (group, chosen) in enumerate(zip(self.model.groups, self.groups, strict=True)):
            axes: dict[int, tuple[str, ...]] = {}
            for axis, atom in zip(self.mesh.names, chosen.split, strict=True):
                if atom is not None:
                    axes[atom] = (*axes.get(atom, ()), axis)

            def place(dims: Any, partial: Sequence[str] = (), axes: Any = axes, sizes: Any = group.sizes) -> Placed:
                return placed([[(sizes[atom], axes.get(atom, ())) for atom in dim] for dim in dims], partial)

            for member in group.members:
                op = self.model.graph.ops[member.op]
                rule = rule_of(op, self.values) or kept_whole(op, self.values)
                factors = [Factor(size=size, kind=FREE) for size in group.sizes]
                for factor, atoms in zip(rule.factors, member.factors, strict=True):
                    for atom in atoms:
                        factors[atom] = replace(factor, size=group.sizes[atom])
                outputs = []
                for dims in member.outputs:
                    inside = {atom for dim in dims or () for atom in dim}
                    summed = {axis for atom in member.sums - inside for axis in axes.get(atom, ())}
                    outputs.append(None if dims is None else place(dims, sorted(summed)))
                split = [each for each in member.scratch if any(atom in axes for atom in each[0])]
                besides = [(of, itemsize) for _, of, itemsize, _ in split]
                # a sum over ranks inside the operator: its source, the summands and the result
                besides += [(of, 3 * itemsize) for atom, of, itemsize, _ in member.talks if atom in axes]
                found[member.op] = ChosenOp(
                    op=op,
                    group=g,
                    rule=Rule(
                        factors=tuple(factors), inputs=member.inputs, outputs=member.outputs, linear=rule.linear
                    ),
                    split=tuple(sorted(axes.items())),
                    inputs=tuple(place(dims) for dims in member.inputs),
                    scratch_nbytes=sum(place(tuple((atom,) for atom in of)).numel(sizes) * nbytes for of, nbytes in besides),
                    traffic_nbytes=sum(
                        place(tuple((atom,) for atom in of)).numel(sizes) * nbytes for _, of, _, nbytes in split
                    ),
                    outputs=tuple(outputs),
                )  # fmt: skip
        return tuple(found[k] for k in range(len(found)))

    @cached_property
    def weights(self) -> Mapping[str, Placed]:
        """The placement in use of each weight, and of each buffer: as the first group that reads it needs it."""
        found: dict[str, Placed] = {}
        for chosen in self.ops:
            for name, place in zip(chosen.op.inputs, chosen.inputs, strict=True):
                found.setdefault(name, place)
        return {name: found[name] for name in self.model.weights}

    def level(self, weight: str) -> tuple[int, ...]:
        return self.groups[self.model.uses[weight][0].group].level


def chosen_layers(plan: Plan, graph: Graph) -> tuple[ChosenLayer, ...]:
    """One for each layer of the model; equal layers are equal objects. Raises `RunError` if the plan is not of this graph, or
    if the graph has an operator that this process lacks."""
    _check_operators(graph)
    models = Layers(graph).models
    made: dict[int, ChosenLayer] = {}
    for layers in plan.layers:
        shared: dict[int, ChosenLayer] = {}  # by graph: what a class of layers needs is found once
        for k in range(layers.first, layers.first + layers.count):
            if k >= len(graph.layers):
                raise RunError(f"the plan has {sum(each.count for each in plan.layers)} layers, the model {len(graph.layers)}")
            which = graph.layers[k].graph
            _check(layers, models[which], graph.layers[k].path)
            made[k] = shared.setdefault(which, ChosenLayer(models[which], layers.groups, plan.mesh))
    if len(made) != len(graph.layers):
        raise RunError(f"the plan has {len(made)} layers, the model {len(graph.layers)}")
    return tuple(made[k] for k in range(len(made)))


def _check_operators(graph: Graph) -> None:
    for op in (op for layer in graph.graphs for op in layer.ops):
        if bind(op) is None:
            raise RunError(f"operator {op.target} ({op.where}) is not registered: import the module that defines it, then lower")


def _check(layers: PlannedLayers, model: LayerModel, path: str) -> None:
    if len(layers.groups) != len(model.groups):
        raise RunError(
            f"layer {path}: the plan has {len(layers.groups)} groups of operators, the model {len(model.groups)}; "
            "plan this model with scrimp.plan"
        )
    for chosen, group in zip(layers.groups, model.groups, strict=True):
        if (chosen.name, chosen.ops, chosen.sizes) != (group.name, len(group.members), group.sizes):
            raise RunError(
                f"layer {path or 'the model'}: the plan's {chosen.name} has {chosen.ops} operators over dims {chosen.sizes}, "
                f"the model's {group.name} has {len(group.members)} over {group.sizes}; plan this model with scrimp.plan"
            )
