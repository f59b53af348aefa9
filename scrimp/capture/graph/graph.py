"""The graph of a training step, layer by layer: operators and tensors of forward and backward; no torch.

Identical layers share one `LayerGraph`; a `Layer` is one occurrence in the model. It is plain data, which the planner reads on
any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PARAMETER, BUFFER, BORDER, TANGENT, MADE = "parameter", "buffer", "border", "tangent", "made"


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor of a layer's graph. `storage`: the value that owns its bytes, itself if it is no view. `kind`: its origin:
    "parameter", "buffer", "border" (another layer, or the batch), "tangent" (the gradient of an output, from the next layer),
    "made" (an operator). `order`: its dims as they lie in memory, the outermost first; empty if they lie in order."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name: "bfloat16"
    storage: str
    kind: str
    order: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ref:
    """A value as an operator's argument."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Named:
    """An argument that is a torch object: `Named(what="dtype", name="bfloat16")`; also device, layout, memory_format."""

    what: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Op:
    """One call of an ATen operator. Arguments are numbers, texts, None, `Ref`s, `Named`s and tuples of those. `outputs`: None for
    unused ones. `cell`: number shared by a forward operator and the backward operators that autograd made of it."""

    name: str
    target: str  # "aten.mm.default"
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[str | None, ...]
    backward: bool
    cell: int
    flops: int
    where: str  # module path in the model, and source line

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors among the arguments, in order, with repeats."""
        return tuple(_refs((*self.args, *(value for _, value in self.kwargs))))


def _refs(argument: Any) -> list[str]:
    if isinstance(argument, Ref):
        return [argument.name]
    if isinstance(argument, tuple):
        return [name for each in argument for name in _refs(each)]
    return []


@dataclass(frozen=True, kw_only=True)
class LayerGraph:
    """`ops` in execution order, the forward's first. `tangents`: outputs and their incoming gradients. `gradients`: parameters
    and inputs, and their outgoing gradients. `updates`: buffers and their new values."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tangents: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
    updates: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Source:
    """The origin of an input: an output of an earlier layer, or, if `layer` is None, a tensor of the batch."""

    layer: int | None
    name: str


@dataclass(frozen=True, kw_only=True)
class Layer:
    """`graph`: index of its `LayerGraph`. `parameters`: maps the graph's parameters and buffers to their names in the model."""

    path: str
    graph: int
    parameters: tuple[tuple[str, str], ...]
    inputs: tuple[Source, ...]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter or buffer of the model. A tied one is one parameter, of several layers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    buffer: bool = False


@dataclass(frozen=True, kw_only=True)
class Graph:
    """`layers` in forward order; `batch`: the example's tensors; `loss`: the output that is the loss."""

    graphs: tuple[LayerGraph, ...]
    layers: tuple[Layer, ...]
    parameters: tuple[Parameter, ...]
    batch: tuple[Value, ...]
    loss: Source
