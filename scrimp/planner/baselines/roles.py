"""Classifies a transformer layer's operator groups by their role around the residual stream, from the dataflow alone.

    column     a matmul of a weight with the residual stream: its columns are heads, or hidden units
    row        a matmul of a weight with the result of a column: it writes back to the stream
    table      an embedding of batch data (tokens); the table of positions is `whole`
    heads      attention; it sums only within a head
    stream     norms, residual additions and dropouts, between a row and the next column
    inside     everything between a column and its row, or after the last column

`baselines/strategies.py` defines tensor parallelism by these roles. Module names play no part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from scrimp.capture import BORDER, PARAMETER, Graph, Op, Value
from scrimp.planner.shard.layer_model import LayerModel

COLUMN, ROW, TABLE, WHOLE, HEADS, STREAM, INSIDE = "column", "row", "table", "whole", "heads", "stream", "inside"
PRODUCTS = ("mm", "addmm", "linear")
_NOTHING = ""  # the place of values made from nothing, or from weights alone


def width_of(graph: Graph) -> int | None:
    """The width of the residual stream: the last dim of the tensor that the most frequent layers take and return in the same
    shape."""
    counts = Counter(layer.graph for layer in graph.layers)
    for index, count in counts.most_common():
        layer = graph.graphs[index]
        shapes = {value.name: value.shape for value in layer.values}
        given = {shapes[name] for name in layer.outputs}
        found = [value for value in layer.values if value.kind == BORDER and value.shape in given and value.shape]
        if count > 1 and found:
            return found[0].shape[-1]
    return None


def roles_of(model: LayerModel, width: int | None) -> tuple[str, ...]:
    """The role of each group."""
    graph, values = model.graph, model.values
    group_of = {member.op: g for g, group in enumerate(model.groups) for member in group.members}
    places = {name: _border(value, width) for name, value in values.items() if value.kind == BORDER}
    roles: dict[int, str] = {}
    streams: set[int] = set()
    ahead = {g for index, g in group_of.items() if not graph.ops[index].backward}
    for index, op in enumerate(graph.ops):
        if op.backward:
            if group_of[index] not in ahead and any(n is not None and values[n].shape[-1:] == (width,) for n in op.outputs):
                streams.add(group_of[index])  # sums gradients of the stream's branches
            continue
        role, place = _role(op, values, places, width)
        if role:
            roles.setdefault(group_of[index], role)
        if place == STREAM:
            streams.add(group_of[index])
        places.update({name: place for name in op.outputs if name is not None})
    return tuple(roles.get(g, STREAM if g in streams else INSIDE) for g in range(len(model.groups)))


def product_of(model: LayerModel, g: int) -> tuple[int, str] | None:
    """The forward member of a group that multiplies by a weight, or looks up in one; and that weight."""
    for k, member in enumerate(model.groups[g].members):
        op = model.graph.ops[member.op]
        weight = None if op.backward else weight_of(op, model.values)
        if weight is not None:
            return k, weight
    return None


def weight_of(op: Op, values: Mapping[str, Value]) -> str | None:
    if _name(op) not in (*PRODUCTS, "embedding"):
        return None
    roots = (values[values[name].storage] for name in op.inputs)
    return next((root.name for root in roots if root.kind == PARAMETER and len(root.shape) > 1), None)


def scores_of(model: LayerModel, width: int | None, seq: int | None) -> frozenset[int]:
    """Groups whose forward makes a value for every pair of positions of a sequence: attention that is not one fused operator."""
    roles, shape = roles_of(model, width), (seq, seq)
    made = [name for op in model.graph.ops if not op.backward for name in op.outputs if name is not None]
    found = {model.makers[name] for name in made if model.values[name].shape[-2:] == shape}
    return frozenset(g for g in found if roles[g] in (INSIDE, HEADS))


def _border(value: Value, width: int | None) -> str:
    return STREAM if value.shape[-1:] == (width,) else INSIDE if value.dtype.startswith(("float", "bfloat")) else _NOTHING


def _role(op: Op, values: Mapping[str, Value], places: Mapping[str, str], width: int | None) -> tuple[str, str]:
    """The role of an operator, and the place of its results."""
    seen = {places[name] for name in op.inputs if name in places}
    place = INSIDE if INSIDE in seen else STREAM if STREAM in seen else _NOTHING
    name = _name(op)
    if weight_of(op, values) is not None:
        if name == "embedding":
            return TABLE if values[values[op.inputs[1]].storage].kind == BORDER else WHOLE, STREAM
        return (ROW, STREAM) if place == INSIDE else (COLUMN, INSIDE)
    if "scaled_dot_product" in name or ("softmax" in name and "log" not in name and _is_square(values[op.inputs[0]].shape)):
        return HEADS, INSIDE
    if "norm" in name and values[op.inputs[0]].shape[-1:] == (width,):
        return "", STREAM
    return "", place


def _is_square(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 or (len(shape) == 3 and shape[-1] == shape[-2])


def _name(op: Op) -> str:
    return op.target.split(".")[1]
