"""Capture: a model and an example batch become the graph of its training step, layer by layer, without torch.

In:   an `nn.Module` (its parameters may be on meta) and a batch.
Out:  a `Graph`: operators and tensors of forward and backward, with identical layers stored once.

    nn.Module ──trace──> Dynamo graph ──split──> layers ──joint──> forward + backward ──> Graph

Read in this order:

    _capture.py     `capture`: the whole of it in one screen
    graph/          `Graph` as frozen dataclasses, its JSON, and its fingerprint
    trace/          fake tensors, patches for Hugging Face models, source locations, diagnosis of failures, few layers of many
    split/          where one layer ends and the next begins; segments that are alike
    joint/          a segment with its backward: folding, pairs of forward and backward operators, FLOPs
    torch_private/  the private names of Dynamo and of AOTAutograd, in one place each
    cache/          graphs in the user's cache, under a key of everything that decides a capture
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.capture._capture import capture
    from scrimp.capture.cache.graph_files import load_graph, save_graph
    from scrimp.capture.cache.model_key import capture_key
    from scrimp.capture.graph.fingerprint import fingerprint
    from scrimp.capture.graph.graph import (
        BORDER,
        BUFFER,
        MADE,
        PARAMETER,
        Graph,
        Layer,
        LayerGraph,
        Named,
        Op,
        Parameter,
        Ref,
        Source,
        Value,
    )
    from scrimp.capture.graph.json import from_json, to_json
    from scrimp.capture.trace.batch_names import batch_tensors

__all__ = [
    "BORDER", "BUFFER", "MADE", "PARAMETER", "Graph", "Layer", "LayerGraph", "Named", "Op", "Parameter", "Ref", "Source", "Value",
    "batch_tensors", "capture", "capture_key", "fingerprint", "from_json", "load_graph", "save_graph", "to_json",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "batch_tensors": "scrimp.capture.trace.batch_names",
        "capture": "scrimp.capture._capture",
        "capture_key": "scrimp.capture.cache.model_key",
        "BORDER": "scrimp.capture.graph.graph",
        "BUFFER": "scrimp.capture.graph.graph",
        "MADE": "scrimp.capture.graph.graph",
        "PARAMETER": "scrimp.capture.graph.graph",
        "Graph": "scrimp.capture.graph.graph",
        "Layer": "scrimp.capture.graph.graph",
        "LayerGraph": "scrimp.capture.graph.graph",
        "Named": "scrimp.capture.graph.graph",
        "Op": "scrimp.capture.graph.graph",
        "Parameter": "scrimp.capture.graph.graph",
        "Ref": "scrimp.capture.graph.graph",
        "Source": "scrimp.capture.graph.graph",
        "Value": "scrimp.capture.graph.graph",
        "fingerprint": "scrimp.capture.graph.fingerprint",
        "from_json": "scrimp.capture.graph.json",
        "load_graph": "scrimp.capture.cache.graph_files",
        "save_graph": "scrimp.capture.cache.graph_files",
        "to_json": "scrimp.capture.graph.json",
    },
)
