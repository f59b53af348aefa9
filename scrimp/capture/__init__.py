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
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.capture._capture import capture
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
    from scrimp.capture.trace.fakes import batch_tensors

__all__ = [
    "BORDER", "BUFFER", "MADE", "PARAMETER", "Graph", "Layer", "LayerGraph", "Named", "Op", "Parameter", "Ref", "Source", "Value",
    "batch_tensors", "capture", "fingerprint", "from_json", "to_json",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "batch_tensors": "scrimp.capture.trace.fakes",
        "capture": "scrimp.capture._capture",
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
        "to_json": "scrimp.capture.graph.json",
    },
)
