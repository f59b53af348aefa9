"""Removes calls without effect from Dynamo's graph; and rejects what a graph of layers cannot represent.

Calls that only some layers have (a log entry in the first, a cast to the same dtype) would make identical layers look different.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx

from scrimp.capture.torch_private.dynamo import (
    autocast_enters,
    autocast_exits,
    depends_on_values,
    grad_switch,
    higher_order,
    logs_use,
    storage_of,
)
from scrimp.errors import CaptureError

WAY_OUT = "run Engine without a plan (data parallel, any eager module)"

# Methods that return their argument where there is nothing to do.
_IDLE = {"to", "contiguous", "float", "double", "half", "bfloat16", "type", "type_as", "expand", "reshape", "view", "cpu"}


_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"}


def value_of(node: fx.Node) -> object:
    """The fake tensor, or the call's other result."""
    return node.meta.get("example_value")


def tensor_of(node: fx.Node) -> Tensor | None:
    value = value_of(node)
    return value if isinstance(value, Tensor) else None


def clean(graph: fx.Graph, where: Callable[[fx.Node], str], way_out: str = WAY_OUT) -> None:
    """In place."""
    for node in list(graph.nodes):
        _refuse(node, where, way_out)
        if logs_use(node) or autocast_exits(node):
            graph.erase_node(node)
        elif _idle(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in list(graph.nodes):
        if autocast_enters(node) is False:  # disabled where it is off anyway; the exit, which refers to it, is removed
            graph.erase_node(node)
    _drop_idle_switches(graph)
    _read_what_was_written(graph)
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "call_method") and not node.users and _pure(node):
            graph.erase_node(node)


def _refuse(node: fx.Node, where: Callable[[fx.Node], str], way_out: str) -> None:
    if autocast_enters(node):
        raise CaptureError(
            f"{where(node)}: autocast inside forward cannot be planned, because dtypes change within layers; cast the "
            f"parameters instead (precision='bf16' does), or {way_out}"
        )
    if depends_on_values(node):
        raise CaptureError(
            f"{where(node)}: {node.name} returns a number or a shape that depends on the values of tensors (.item(), nonzero, "
            f"x[mask]), which a plan cannot know in advance; {way_out}"
        )
    name = higher_order(node)
    if name is not None and "checkpoint" in name:
        raise CaptureError(
            f"{where(node)}: activation checkpointing is on inside the model, but the plan decides what to recompute: "
            "switch it off (Hugging Face: model.gradient_checkpointing_disable()) and capture again"
        )
    if name is not None:
        raise CaptureError(f"{where(node)}: {name} holds a graph inside the graph, which cannot be planned; {way_out}")


def _idle(node: fx.Node) -> bool:
    given = tensor_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    made = tensor_of(node)
    if given is None or made is None:
        return False
    if node.target is F.dropout:
        rate, on = _argument(node, 1, "p", 0.5), _argument(node, 2, "training", True)
        return rate == 0 or not on
    if node.op != "call_method" or node.target not in _IDLE:
        return False
    return _is(given, made) and given.dtype == made.dtype and given.requires_grad == made.requires_grad


def _argument(node: fx.Node, position: int, name: str, default: object) -> object:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _drop_idle_switches(graph: fx.Graph) -> None:
    """Removes grad-mode switches without calls between them, and those that change nothing."""
    state, last = True, None
    for node in list(graph.nodes):
        wanted = grad_switch(node)
        if wanted is None:
            last = None if node.op in ("call_function", "call_method") else last
        elif wanted == state:
            graph.erase_node(node)
        elif last is not None:  # no call since the switch away from `wanted`
            graph.erase_node(last)
            graph.erase_node(node)
            state, last = wanted, None
        else:
            state, last = wanted, node


def _read_what_was_written(graph: fx.Graph) -> None:
    """After `x.add_(y)`, readers of x read that call's result instead: then layers pass on the tensors that they wrote into."""
    place = {node: k for k, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        given = node.args[0] if node.args else None
        if _writes(node) and isinstance(given, fx.Node) and _is(tensor_of(node), tensor_of(given)):
            for user in [user for user in given.users if place[user] > place[node]]:
                user.replace_input_with(given, node)


def _is(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None or storage_of(one) != storage_of(two):
        return False
    return one.shape == two.shape and one.stride() == two.stride() and one.storage_offset() == two.storage_offset()


def _writes(node: fx.Node) -> bool:
    """Whether it writes into its first argument, by the naming conventions of Python and torch."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _pure(node: fx.Node) -> bool:
    """Whether it has no side effect, so that it can be removed if unused."""
    if grad_switch(node) is not None or _writes(node):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name not in {"setitem", "batch_norm"} and "out" not in node.kwargs
