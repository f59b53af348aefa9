"""Converts a joint graph to a `LayerGraph`: names, storages, cells, FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from scrimp.capture.graph.graph import MADE, TANGENT, LayerGraph, Named, Op, Ref, Value
from scrimp.capture.joint.flops import LITERALS, flops
from scrimp.capture.joint.fold import fold
from scrimp.capture.joint.fwd_bwd_pairs import cells, owners
from scrimp.capture.torch_private.joint import describe, is_backward, is_view
from scrimp.capture.trace.fakes import dtype_name
from scrimp.errors import CaptureError


@dataclass(frozen=True, kw_only=True)
class Input:
    """The name and kind of an input."""

    name: str
    kind: str


def layer_graph(joint: fx.GraphModule, inputs: Sequence[Input], where: Callable[[fx.Node], str]) -> LayerGraph:
    numbers = owners(joint.graph)
    fold(joint.graph)
    ends = describe(joint)
    builder = _Builder(where)
    for position, node in sorted(ends.inputs.items()):
        builder.name(node, inputs[position].name, inputs[position].kind)
    for node in ends.tangents.values():
        builder.name(node, node.name, TANGENT)
    nodes = [node for node in joint.graph.nodes if node.op in ("call_function", "get_attr") and node.target is not getitem]
    cell = cells(nodes, numbers)
    first = {cell[node]: where(node) for node in reversed(nodes) if not is_backward(node)}
    ops = [builder.op(joint, node, cell[node], first.get(cell[node]) or where(node)) for node in nodes]
    names = builder.names
    outputs = [ends.outputs[k] for k in range(len(ends.outputs))]
    return LayerGraph(
        values=tuple(builder.values.values()),
        ops=tuple(ops),
        inputs=tuple(names[ends.inputs[k]] for k in range(len(ends.inputs))),
        outputs=tuple(names[node] for node in outputs),
        tangents=tuple((names[ends.outputs[k]], names[node]) for k, node in sorted(ends.tangents.items())),
        gradients=tuple((names[ends.inputs[k]], names[node]) for k, node in sorted(ends.gradients.items())),
        updates=tuple((names[ends.inputs[k]], names[node]) for k, node in sorted(ends.updates.items())),
    )


class _Builder:
    def __init__(self, where: Callable[[fx.Node], str]) -> None:
        self.where = where
        self.names: dict[fx.Node, str] = {}
        self.values: dict[str, Value] = {}

    def name(self, node: fx.Node, wanted: str, kind: str, base: str | None = None) -> str:
        name, tries = wanted, 1
        while name in self.values:
            name, tries = f"{wanted}.{tries}", tries + 1
        tensor = node.meta["val"]
        self.names[node] = name
        self.values[name] = Value(
            name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), storage=base or name, kind=kind,
            order=_memory_order(tensor),
        )  # fmt: skip
        return name

    def op(self, joint: fx.GraphModule, node: fx.Node, cell: int, where: str) -> Op:
        if node.op == "get_attr":
            return self._constant(joint, node, cell, where)
        args, kwargs = self.argument(node.args), tuple((name, self.argument(value)) for name, value in node.kwargs.items())
        base = None
        if is_view(node.target) and isinstance(node.args[0], fx.Node):
            base = self.values[self.names[node.args[0]]].storage
        outputs = self._outputs(node, base)
        made = Op(
            name=node.name, target=str(node.target), args=args, kwargs=kwargs, outputs=outputs,
            backward=is_backward(node), cell=cell, flops=0, where=where,
        )  # fmt: skip
        given = [self.values[name].shape for name in made.inputs]
        shapes = [None if name is None else self.values[name].shape for name in outputs]
        literal = made.args[LITERALS[made.target]] if made.target in LITERALS else 0
        return replace(made, flops=flops(made.target, given, shapes, literal))

    def _outputs(self, node: fx.Node, base: str | None) -> tuple[str | None, ...]:
        value = node.meta["val"]
        if isinstance(value, Tensor):
            return (self.name(node, node.name, MADE, base),)
        parts: list[str | None] = [None] * len(value)
        for user in node.users:
            assert user.target is getitem
            parts[user.args[1]] = self.name(user, user.name, MADE, base)  # type: ignore[index]
        return tuple(parts)

    def _constant(self, joint: fx.GraphModule, node: fx.Node, cell: int, where: str) -> Op:
        """A constant: a tensor that the forward made of a number."""
        tensor = getattr(joint, str(node.target))
        real = getattr(tensor, "constant", None) if type(tensor) is not Tensor else tensor
        if real is None or real.numel() != 1:
            raise CaptureError(
                f"{where}: a tensor of shape {tuple(tensor.shape)} is made of Python numbers inside forward; make it once "
                "and register it as a buffer"
            )
        node.meta.setdefault("val", tensor)
        kwargs = (("dtype", _named(tensor.dtype)),)
        return Op(
            name=node.name, target="aten.full.default", args=(tuple(tensor.shape), real.item()), kwargs=kwargs,
            outputs=(self.name(node, node.name, MADE),), backward=is_backward(node), cell=cell, flops=0, where=where,
        )  # fmt: skip

    def argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Ref(name=self.names[value])
        if isinstance(value, (tuple, list)):
            return tuple(self.argument(each) for each in value)
        if isinstance(value, (bool, int, float, str)) or value is None:
            return value
        return _named(value)


def _memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Dims of size 1 stay where they are: their strides mean nothing."""
    long = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    strides = tensor.stride()
    lying = sorted(long, key=lambda dim: -strides[dim])
    if lying == long or any(strides[dim] == 0 for dim in long):
        return ()
    places = iter(lying)
    return tuple(next(places) if tensor.shape[dim] > 1 else dim for dim in range(tensor.dim()))


def _named(value: Any) -> Named:
    for what in ("dtype", "device", "layout", "memory_format"):
        if isinstance(value, getattr(torch, what)):
            return Named(what=what, name=str(value).removeprefix("torch."))
    raise CaptureError(f"an operator has the argument {value!r} of type {type(value).__name__}, which a graph cannot represent")
