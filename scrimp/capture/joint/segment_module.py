"""Turns a segment of Dynamo's graph into a module whose outputs share storage with no input and no other output.

Autograd makes no gradient for an output that is an input, or a view of one, or a view of another output: such an output is
copied. So is an input that the segment writes into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from scrimp.capture.graph.graph import Parameter
from scrimp.capture.split.segment import Stretch
from scrimp.capture.torch_private.dynamo import storage_of
from scrimp.capture.torch_private.joint import FakeTensorMode
from scrimp.capture.trace.clean import tensor_of
from scrimp.capture.trace.fakes import fake


@dataclass(frozen=True, kw_only=True)
class Piece:
    """`written`: the inputs, by position, that it writes into in place and that are no buffers."""

    module: fx.GraphModule
    inputs: list[Tensor]
    written: frozenset[int]


def piece(part: Stretch, root: nn.Module, owned: Mapping[fx.Node, Parameter], mode: FakeTensorMode) -> Piece:
    def inputs(grad: bool) -> list[Tensor]:
        return [fake(mode, given, given.requires_grad and grad) for given in map(_tensor, part.inputs)]

    trial = inputs(grad=False)
    shared, written = _probe(_module(part, root, frozenset(), frozenset()), trial, mode)
    buffers = {k for k, node in enumerate(part.inputs) if node in owned and owned[node].buffer}
    copied = frozenset(written - buffers)
    module = _module(part, root, shared, copied)
    return Piece(module=module, inputs=inputs(grad=True), written=copied)


def _probe(module: fx.GraphModule, inputs: list[Tensor], mode: FakeTensorMode) -> tuple[frozenset[int], set[int]]:
    """The outputs that share storage with an input or an earlier output, and the inputs that are written into."""
    versions = [given._version for given in inputs]
    with mode, torch.no_grad():
        outputs = module(*inputs)
    seen = {storage_of(given) for given in inputs}
    shared = set()
    for k, made in enumerate(outputs):
        if storage_of(made) in seen:
            shared.add(k)
        seen.add(storage_of(made))
    return frozenset(shared), {k for k, given in enumerate(inputs) if given._version != versions[k]}


def _module(part: Stretch, root: nn.Module, shared: frozenset[int], copied: frozenset[int]) -> fx.GraphModule:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in part.inputs:
        env[node] = graph.placeholder(node.name)
    for k in sorted(copied):
        env[part.inputs[k]] = graph.call_method("clone", (env[part.inputs[k]],))
    for node in part.nodes:
        env[node] = graph.node_copy(node, _lookup(env))
    outputs = [graph.call_method("clone", (env[node],)) if k in shared else env[node] for k, node in enumerate(part.outputs)]
    graph.output(tuple(outputs))
    return fx.GraphModule(root, graph)


def _lookup(env: Mapping[fx.Node, fx.Node]) -> Callable[[fx.Node], fx.Node]:
    return lambda node: env[node]


def _tensor(node: fx.Node) -> Tensor:
    tensor = tensor_of(node)
    assert tensor is not None, f"{node} crosses a layer boundary and is not a tensor"
    return tensor
