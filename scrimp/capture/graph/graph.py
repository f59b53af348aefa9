"""What training a model computes, layer by layer: operators and tensors of the forward and of the backward, without torch.

Layers that are alike share one `LayerGraph`; a `Layer` says where one of them stands in the model. All of it is data: planning
reads it on any machine, lowering makes programs of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PARAMETER, BUFFER, BORDER, TANGENT, MADE = "parameter", "buffer", "border", "tangent", "made"


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor of a layer's graph. `storage`: the value whose bytes these are, itself if they are its own. `kind`: where it
    comes from: "parameter", "buffer", "border" (another layer, or the batch), "tangent" (the gradient of an output, from
    the layer behind), "made" (an operator)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as torch says it: "bfloat16"
    storage: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class Ref:
    """A value as an operator's argument."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Named:
    """An argument that torch has an object for: `Named(what="dtype", name="bfloat16")`; also device, layout, memory_format."""

    what: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Op:
    """One call of an operator of ATen. Arguments are numbers, texts, None, `Ref`s, `Named`s and tuples of those. `outputs`:
    None where nobody uses one. `cell`: shared by an operator of the forward and those that autograd made of it."""

    name: str
    target: str  # "aten.mm.default"
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[str | None, ...]
    backward: bool
    cell: int
    flops: int
    where: str  # the module's path in the model, and the line

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors among the arguments, in order, as often as they stand there."""
        return tuple(_refs((*self.args, *(value for _, value in self.kwargs))))


def _refs(argument: Any) -> list[str]:
    if isinstance(argument, Ref):
        return [argument.name]
    if isinstance(argument, tuple):
        return [name for each in argument for name in _refs(each)]
    return []


@dataclass(frozen=True, kw_only=True)
class LayerGraph:
    """`ops` in the order in which they run, the forward's first. `tangents`: outputs and the gradients of them that come in.
    `gradients`: parameters and inputs, and the gradients of them that go out. `updates`: buffers and their new values."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tangents: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
    updates: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Source:
    """What an input is: an output of an earlier layer, or, if `layer` is None, a tensor of the batch."""

    layer: int | None
    name: str


@dataclass(frozen=True, kw_only=True)
class Layer:
    """`graph`: its index. `parameters`: of the graph's parameters and buffers the names that they have in the model here."""

    path: str
    graph: int
    parameters: tuple[tuple[str, str], ...]
    inputs: tuple[Source, ...]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """Of the model. What is tied is one parameter, of several layers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    buffer: bool = False


@dataclass(frozen=True, kw_only=True)
class Graph:
    """`layers` in the order of the forward; `batch`: the example's tensors; `loss`: which output is."""

    graphs: tuple[LayerGraph, ...]
    layers: tuple[Layer, ...]
    parameters: tuple[Parameter, ...]
    batch: tuple[Value, ...]
    loss: Source
