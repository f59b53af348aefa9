"""Checkpoints: every rank writes its shards; a rename commits them; any rank count, chunk size and budget reads them.

In:   a `Store` and the engine's counters.
Out:  a folder of safetensors files and a manifest.

    folder.tmp/rank-*.safetensors ──> manifest.json ──rename──> folder/

    _manifest.py  what the folder says of itself
    _tiles.py     parameters that a plan splits over ranks
    _write.py     a safetensors file written tensor by tensor
    _save.py, _load.py
    _steps.py     the checkpoints of a run: the newest complete one, removing old ones
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.checkpoint._load import load
    from scrimp.checkpoint._save import save
    from scrimp.checkpoint._steps import latest, prune, step_folder
    from scrimp.checkpoint._write import Named

__all__ = ["Named", "latest", "load", "prune", "save", "step_folder"]

__getattr__ = lazily(
    __name__,
    {
        "load": "scrimp.checkpoint._load",
        "save": "scrimp.checkpoint._save",
        "latest": "scrimp.checkpoint._steps",
        "prune": "scrimp.checkpoint._steps",
        "step_folder": "scrimp.checkpoint._steps",
        "Named": "scrimp.checkpoint._write",
    },
)
