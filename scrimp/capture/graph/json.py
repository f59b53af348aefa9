"""Converts a `Graph` to JSON and back. The text is deterministic."""

from __future__ import annotations

import json
import math
from typing import Any

from scrimp.capture.graph.graph import Graph, Layer, LayerGraph, Named, Op, Parameter, Ref, Source, Value
from scrimp.errors import CaptureError, check_format

FORMAT, VERSION = "scrimp.graph", 2


def to_json(graph: Graph) -> str:
    data = {
        "format": FORMAT,
        "version": VERSION,
        "graphs": [_layer_graph(each) for each in graph.graphs],
        "layers": [{**vars(each), "inputs": [vars(source) for source in each.inputs]} for each in graph.layers],
        "parameters": [vars(each) for each in graph.parameters],
        "batch": [vars(each) for each in graph.batch],
        "loss": vars(graph.loss),
    }
    return json.dumps(data, allow_nan=False)


def from_json(text: str) -> Graph:
    data: dict[str, Any] = json.loads(text)
    check_format(data, FORMAT, VERSION, CaptureError)
    return Graph(
        graphs=tuple(_read_layer_graph(each) for each in data["graphs"]),
        layers=tuple(
            Layer(
                path=each["path"],
                graph=each["graph"],
                parameters=_pairs(each["parameters"]),
                inputs=tuple(Source(**source) for source in each["inputs"]),
            )
            for each in data["layers"]
        ),
        parameters=tuple(Parameter(**{**each, "shape": tuple(each["shape"])}) for each in data["parameters"]),
        batch=tuple(_read_value(each) for each in data["batch"]),
        loss=Source(**data["loss"]),
    )


def _layer_graph(graph: LayerGraph) -> dict[str, Any]:
    values, ops = [vars(each) for each in graph.values], [_op(each) for each in graph.ops]
    return {**vars(graph), "values": values, "ops": ops}


def _read_layer_graph(data: dict[str, Any]) -> LayerGraph:
    return LayerGraph(
        values=tuple(_read_value(each) for each in data["values"]),
        ops=tuple(_read_op(each) for each in data["ops"]),
        inputs=tuple(data["inputs"]),
        outputs=tuple(data["outputs"]),
        tangents=_pairs(data["tangents"]),
        gradients=_pairs(data["gradients"]),
        updates=_pairs(data["updates"]),
    )


def _read_value(data: dict[str, Any]) -> Value:
    return Value(**{**data, "shape": tuple(data["shape"]), "order": tuple(data["order"])})


def _op(op: Op) -> dict[str, Any]:
    kwargs = [[name, _argument(value)] for name, value in op.kwargs]
    return {**vars(op), "args": [_argument(each) for each in op.args], "kwargs": kwargs}


def _read_op(data: dict[str, Any]) -> Op:
    args = tuple(_read_argument(each) for each in data["args"])
    kwargs = tuple((name, _read_argument(value)) for name, value in data["kwargs"])
    return Op(**{**data, "args": args, "kwargs": kwargs, "outputs": tuple(data["outputs"])})


def _argument(value: Any) -> Any:
    """Tuples become lists; types that JSON lacks become an object with one entry."""
    match value:
        case Ref(name=name):
            return {"value": name}
        case Named(what=what, name=name):
            return {what: name}
        case tuple():
            return [_argument(each) for each in value]
        case float() if not math.isfinite(value):
            return {"float": repr(value)}
    return value


def _read_argument(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_read_argument(each) for each in data)
    if not isinstance(data, dict):
        return data
    ((what, name),) = data.items()
    if what == "value":
        return Ref(name=name)
    return float(name) if what == "float" else Named(what=what, name=name)


def _pairs(rows: list[list[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((one, two) for one, two in rows)
