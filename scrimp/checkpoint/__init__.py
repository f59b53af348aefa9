"""Checkpoints: every rank writes its shards; a rename commits them; any rank count, chunk size and budget reads them.

In:   a `Store` and the engine's counters.
Out:  a folder of safetensors files and a manifest.

    folder.tmp/rank-*.safetensors ──> manifest.json ──rename──> folder/

    _manifest.py  what the folder says of itself
    _tiles.py     parameters that a plan splits over ranks
    _write.py     a safetensors file written tensor by tensor
    _save.py, _load.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.checkpoint._load import load
    from scrimp.checkpoint._save import save
    from scrimp.checkpoint._write import Named

__all__ = ["Named", "load", "save"]

__getattr__ = lazily(
    __name__,
    {
        "load": "scrimp.checkpoint._load",
        "save": "scrimp.checkpoint._save",
        "Named": "scrimp.checkpoint._write",
    },
)
