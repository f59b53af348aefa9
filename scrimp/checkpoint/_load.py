"""Loading: every rank takes from every file the parts that lie in its own shards, and nothing else."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from scrimp.checkpoint._manifest import Entry, Manifest, checksum
from scrimp.checkpoint._save import ASIDE
from scrimp.chunks._home import Piece
from scrimp.chunks._store import Store
from scrimp.errors import CheckpointError

Loaded = tuple[Manifest, dict[str, torch.Tensor], dict[str, torch.Tensor]]


def load(folder: str | Path, store: Store, *, optimizer: str) -> Loaded:
    """Fill the store; the manifest, this rank's random state if the checkpoint was written by as many ranks, and the
    buffers."""
    where = Path(folder)
    if not where.exists() and where.with_name(where.name + ASIDE).exists():
        where = where.with_name(where.name + ASIDE)
    manifest = Manifest.read(where)
    _compare(where, manifest, store, optimizer)
    for name, wanted in manifest.files:
        if not (where / name).exists():
            raise CheckpointError(f"{where / name} is missing")
        found = checksum(where / name).hex()
        if found != wanted:
            raise CheckpointError(
                f"{where / name} is damaged: its checksum is {found[:16]}..., the manifest says {wanted[:16]}..."
            )
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(where / name, "pt")) for name, _ in manifest.files]
        for index, layer in enumerate(store.table.layers):
            with store.opened(index, write=True, read=False) as data:
                for slot in layer.slots:
                    for piece in data.pieces(slot):
                        _fill(files, manifest.entries[slot.name], piece)
        same = len(manifest.files) == store.wire.world
        rng = _named(files[store.wire.rank], "rng.") if same else {}
        buffers = _named(files[0], "buffer.")
    return manifest, rng, buffers


def _named(file: Any, prefix: str) -> dict[str, torch.Tensor]:
    names = [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 - a file handle is no dict
    return {key.removeprefix(prefix): file.get_tensor(key) for key in names}


def _fill(files: list[Any], entry: Entry, piece: Piece) -> None:
    """A piece from all extents that it shares elements with."""
    for extent in entry.extents:
        begin = max(extent.start, piece.inside.start)
        end = min(extent.start + extent.length, piece.inside.stop)
        if begin >= end:
            continue
        into = slice(begin - piece.inside.start, end - piece.inside.start)
        out = slice(extent.place + begin - extent.start, extent.place + end - extent.start)
        file = files[extent.rank]
        piece.weight[into].copy_(file.get_slice(f"weights.{entry.layer}")[out])
        if entry.trainable:
            if not entry.own_master:
                piece.master[into].copy_(file.get_slice(f"master.{entry.layer}")[out])
            for k, state in enumerate(piece.states):
                state[into].copy_(file.get_slice(f"state-{k}.{entry.layer}")[out])


def _compare(where: Path, manifest: Manifest, store: Store, optimizer: str) -> None:
    have = {slot.name: (slot.shape, slot.trainable) for layer in store.table.layers for slot in layer.slots}
    saved = {name: (entry.shape, entry.trainable) for name, entry in manifest.entries.items()}
    if have != saved:
        missing, extra = sorted({*have} - {*saved}), sorted({*saved} - {*have})
        other = [
            f"{name}: {saved[name]} saved, {have[name]} here" for name in have if name in saved and have[name] != saved[name]
        ]
        raise CheckpointError(f"{where} holds another model: missing {missing[:3]}, not known {extra[:3]}, different {other[:3]}")
    if manifest.precision != store.precision:
        raise CheckpointError(f"{where} was saved in {manifest.precision}, the engine runs in {store.precision}")
    if (manifest.optimizer, manifest.states) != (optimizer, store.states):
        raise CheckpointError(
            f"{where} was saved with {manifest.optimizer} of {manifest.states} states, "
            f"the engine has {optimizer} of {store.states}"
        )
