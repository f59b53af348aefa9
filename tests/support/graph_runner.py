"""Runs a `Graph` on real tensors, operator by operator: what capture says is held against what PyTorch does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from scrimp.capture import Graph, LayerGraph, Named, Op, Ref


@dataclass(frozen=True, kw_only=True)
class Run:
    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def run(graph: Graph, tensors: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Run:
    """Forward through all layers, then backward through all. Every value's shape, dtype and storage is checked on the way."""
    env: dict[tuple[int | None, str], Tensor] = {(None, name): tensor for name, tensor in batch.items()}
    values: list[dict[str, Tensor]] = []
    buffers: dict[str, Tensor] = {}
    current = dict(tensors)
    for index, layer in enumerate(graph.layers):
        part = graph.graphs[layer.graph]
        local = {name: current[full] for name, full in layer.parameters}
        borders = [name for name in part.inputs if name not in local]
        local.update({name: env[source.layer, source.name] for name, source in zip(borders, layer.inputs, strict=True)})
        _check_given(part, local)
        _steps(part, local, backward=False)
        names = dict(layer.parameters)
        for name, new in part.updates:
            current[names[name]] = buffers[names[name]] = local[new]
        env.update({(index, name): local[name] for name in part.outputs})
        values.append(local)
    loss = env[graph.loss.layer, graph.loss.name]
    tangents: dict[tuple[int | None, str], Tensor] = {(graph.loss.layer, graph.loss.name): torch.ones_like(loss)}
    gradients: dict[str, Tensor] = {}
    for index in reversed(range(len(graph.layers))):
        layer, local = graph.layers[index], values[index]
        part = graph.graphs[layer.graph]
        for output, tangent in part.tangents:
            local[tangent] = tangents.get((index, output), torch.zeros_like(local[output]))
        _steps(part, local, backward=True)
        names = dict(layer.parameters)
        borders = [name for name in part.inputs if name not in names]
        sources = dict(zip(borders, layer.inputs, strict=True))
        for name, gradient in part.gradients:
            if name in names:
                gradients[names[name]] = gradients.get(names[name], 0) + local[gradient]
            else:
                place = (sources[name].layer, sources[name].name)
                tangents[place] = tangents.get(place, 0) + local[gradient]
    return Run(loss=loss, gradients=gradients, buffers=buffers)


def _steps(part: LayerGraph, local: dict[str, Tensor], backward: bool) -> None:
    described = {value.name: value for value in part.values}
    owner = {local[name].untyped_storage()._cdata: described[name].storage for name in local if name in described}
    with torch.no_grad():
        for op in part.ops:
            if op.backward != backward:
                continue
            result = _call(op, local)
            made = result if isinstance(result, (tuple, list)) else (result,)
            for name, tensor in zip(op.outputs, made, strict=True):
                if name is None:
                    continue
                local[name] = tensor
                value = described[name]
                assert (tuple(tensor.shape), str(tensor.dtype)) == (value.shape, f"torch.{value.dtype}"), (op, tensor.shape)
                base = owner.setdefault(tensor.untyped_storage()._cdata, name)
                assert tensor.numel() == 0 or value.storage == base, f"{op.target} {name} is in {base}, not in {value.storage}"


def _call(op: Op, local: Mapping[str, Tensor]) -> Any:
    def real(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return local[argument.name]
        if isinstance(argument, Named):
            return torch.device(argument.name) if argument.what == "device" else getattr(torch, argument.name)
        return [real(each) for each in argument] if isinstance(argument, tuple) else argument

    function = attrgetter(op.target)(torch.ops)
    return function(*(real(each) for each in op.args), **{name: real(value) for name, value in op.kwargs})


def _check_given(part: LayerGraph, local: Mapping[str, Tensor]) -> None:
    for value in part.values:
        if value.name in local:
            tensor = local[value.name]
            assert (tuple(tensor.shape), str(tensor.dtype)) == (value.shape, f"torch.{value.dtype}"), value
