"""A graph's fingerprint: equal for two captures of one model, whatever the device, the version of torch or its attention kernel.

Values are numbered in the order in which they appear, so that names do not count; source lines, devices and FLOPs are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from scrimp.capture.graph.graph import Graph, LayerGraph, Named, Ref
from scrimp.capture.joint.flops import ATTENTION

_LEFT_OUT = ("device", "layout", "pin_memory")


def fingerprint(graph: Graph) -> str:
    data = {
        "graphs": [_layer(each) for each in graph.graphs],
        "layers": [
            [each.path, each.graph, [name for _, name in each.parameters], [[source.layer] for source in each.inputs]]
            for each in graph.layers
        ],
        "parameters": [[each.name, each.shape, each.dtype, each.trained, each.buffer] for each in graph.parameters],
        "batch": [[each.name, each.shape, each.dtype] for each in graph.batch],
        "loss": graph.loss.layer,
    }
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:32]


def _layer(graph: LayerGraph) -> list[Any]:
    numbers: dict[str, int] = {}
    described = {value.name: value for value in graph.values}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    for name in (*graph.inputs, *(tangent for _, tangent in graph.tangents)):
        number(name)
    ops = []
    for op in graph.ops:
        named = op.target.removeprefix("aten.").partition(".")[0]
        backward = named.endswith("_backward")
        target = op.target
        args, kwargs = _argument(op.args, number), [[name, _argument(value, number)] for name, value in op.kwargs]
        if named.removesuffix("_backward") in ATTENTION:
            target, args = f"attention{'_backward' if backward else ''}", [number(name) for name in op.inputs]
        made = [number(name) for name in op.outputs if name is not None]
        ops.append([target, args, [pair for pair in kwargs if pair[0] not in _LEFT_OUT], made, op.backward])
    values = [[described[name].shape, described[name].dtype, described[name].kind] for name in numbers]
    ends = [
        [number(name) for name in graph.outputs],
        *([[number(a), number(b)] for a, b in pairs] for pairs in (graph.tangents, graph.gradients, graph.updates)),
    ]
    return [values, ops, ends]


def _argument(value: Any, number: Callable[[str], int]) -> Any:
    match value:
        case Ref(name=name):
            return {"value": number(name)}
        case Named(what="device"):
            return {"device": ""}
        case Named(what=what, name=name):
            return {what: name}
        case tuple():
            return [_argument(each, number) for each in value]
        case float():
            return {"float": repr(value)}
    return value
