"""A segment of the graph: its inputs, its outputs, and a key that identical segments share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from scrimp.capture.graph.graph import Parameter
from scrimp.capture.trace.clean import tensor_of


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """`inputs` in the order of their first use, `outputs` in the order in which they are made."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def stretch(nodes: Sequence[fx.Node]) -> Stretch:
    inside = set(nodes)
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        for given in node.all_input_nodes:
            if given not in inside:
                inputs[given] = None
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    return Stretch(nodes=tuple(nodes), inputs=tuple(inputs), outputs=outputs)


def key(part: Stretch, owned: Mapping[fx.Node, Parameter]) -> Hashable:
    """Equal keys: the same calls, on inputs of the same kinds, shapes and dtypes, with the same outputs."""
    index: dict[fx.Node, tuple[str, int]] = {node: ("in", k) for k, node in enumerate(part.inputs)}
    index.update({node: ("at", k) for k, node in enumerate(part.nodes)})
    inputs = tuple((_kind(node, owned), _look(tensor_of(node))) for node in part.inputs)
    calls = tuple((node.op, node.target, _plain((node.args, node.kwargs), index), _look(tensor_of(node))) for node in part.nodes)
    return inputs, calls, tuple(index[node] for node in part.outputs)


def _kind(node: fx.Node, owned: Mapping[fx.Node, Parameter]) -> str:
    if node not in owned:
        return "border"
    return "buffer" if owned[node].buffer else "parameter"


def _look(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad


def _plain(value: Any, index: Mapping[fx.Node, tuple[str, int]]) -> Hashable:
    """A hashable form in which 1, True and 1.0 differ."""
    if isinstance(value, fx.Node):
        return index[value]
    if isinstance(value, (tuple, list)):
        return tuple(_plain(each, index) for each in value)
    if isinstance(value, dict):
        return tuple((name, _plain(each, index)) for name, each in sorted(value.items()))
    if isinstance(value, slice):
        return "slice", _plain((value.start, value.stop, value.step), index)
    if isinstance(value, (bool, int, float, str)) or value is None:
        return type(value).__name__, value
    return repr(value)
