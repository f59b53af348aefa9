"""Checkpoints: every rank writes its shards; a rename commits them; any rank count, chunk size and budget reads them.

In:   a `Store` and the engine's counters.
Out:  a folder of safetensors files and a manifest.

    folder.unfinished/rank-*.safetensors ──> manifest.json ──rename──> folder/

    _manifest.py  what the folder says of itself
    _tiles.py     parameters that a plan splits over ranks
    _header.py    the header of a safetensors file
    _write.py     a safetensors file written part by part, with a checksum of each tensor
    _layers.py    the tensors of a layer, from where they are
    _save.py      one checkpoint of one rank: `Save`
    _snapshot.py  the state at one point of training, for a save in the background
    _agree.py     how the ranks agree that all have written
    _verify.py    which file and tensor is damaged
    _load.py      fills a store
    _read.py      an opened checkpoint, without an engine
    _reshard.py   writes one for another number of ranks
    _steps.py     the checkpoints of a run: the newest complete one, removing old ones
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.checkpoint._load import load
    from scrimp.checkpoint._read import Checkpoint
    from scrimp.checkpoint._reshard import reshard
    from scrimp.checkpoint._save import Content, Save, written_layers
    from scrimp.checkpoint._snapshot import Snapshot, buffer_nbytes
    from scrimp.checkpoint._steps import latest, prune, step_folder
    from scrimp.checkpoint._write import Named, ShardFile

__all__ = [
    "Checkpoint", "Content", "Named", "Save", "ShardFile", "Snapshot", "buffer_nbytes", "latest", "load", "prune", "reshard",
    "step_folder", "written_layers",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "load": "scrimp.checkpoint._load",
        "Content": "scrimp.checkpoint._save",
        "Save": "scrimp.checkpoint._save",
        "written_layers": "scrimp.checkpoint._save",
        "Snapshot": "scrimp.checkpoint._snapshot",
        "buffer_nbytes": "scrimp.checkpoint._snapshot",
        "latest": "scrimp.checkpoint._steps",
        "prune": "scrimp.checkpoint._steps",
        "step_folder": "scrimp.checkpoint._steps",
        "Checkpoint": "scrimp.checkpoint._read",
        "reshard": "scrimp.checkpoint._reshard",
        "ShardFile": "scrimp.checkpoint._write",
        "Named": "scrimp.checkpoint._write",
    },
)
