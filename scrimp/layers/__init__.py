"""Layers: the units that are fetched, run, recomputed, updated and evicted.

In:   an `nn.Module`.
Out:  its layers, in the order of the module tree, found by repeated structure and never by class names.

    model ──> [embedding] [block 0] [block 1] ... [head]

The engine, capture and the chunk store all take their layers from here.

    _find.py    `find_layers`
    _caches.py  no key-value caches while training
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.layers._caches import no_caches
    from scrimp.layers._find import Layer, find_layers

__all__ = ["Layer", "find_layers", "no_caches"]

__getattr__ = lazily(
    __name__,
    {
        "no_caches": "scrimp.layers._caches",
        "Layer": "scrimp.layers._find",
        "find_layers": "scrimp.layers._find",
    },
)
