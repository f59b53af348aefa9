"""A model and an example batch -> what training it computes, in layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scrimp.capture._graph import Graph, Layer, LayerGraph, Named, Op, Parameter, Ref, Source, Value
from scrimp.capture._json import from_json, to_json

if TYPE_CHECKING:
    from scrimp.capture._capture import capture

__all__ = [
    "Graph", "Layer", "LayerGraph", "Named", "Op", "Parameter", "Ref", "Source", "Value", "capture", "from_json", "to_json",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Reading a graph needs no torch; making one does."""
    if name == "capture":
        from scrimp.capture._capture import capture

        return capture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
