"""Loading: every rank takes from every file the parts that lie in its own shards, and nothing else."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from scrimp.checkpoint._manifest import Manifest, checksum
from scrimp.checkpoint._save import ASIDE
from scrimp.chunks._store import Store
from scrimp.errors import CheckpointError

Loaded = tuple[Manifest, torch.Tensor | None, dict[str, torch.Tensor]]


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
            for slot in layer.slots:
                for piece in store.pieces(index, slot):
                    for extent in manifest.entries[slot.name].extents:
                        begin = max(extent.start, piece.inside.start)
                        end = min(extent.start + extent.length, piece.inside.stop)
                        if begin < end:
                            into = slice(begin - piece.inside.start, end - piece.inside.start)
                            _read(files[extent.rank], manifest, extent, begin, end, piece, into, slot.trainable)
        same = len(manifest.files) == store.wire.world
        rng = files[store.wire.rank].get_tensor("rng") if same else None
        prefix = "buffer."
        names = [key for key in files[0].keys() if key.startswith(prefix)]  # noqa: SIM118 - a file handle is no dict
        buffers = {key.removeprefix(prefix): files[0].get_tensor(key) for key in names}
    return manifest, rng, buffers


def _read(file: Any, manifest: Manifest, extent: Any, begin: int, end: int, piece: Any, into: slice, trainable: bool) -> None:
    offset, length = begin - extent.start, end - begin

    def part(name: str, start: int) -> torch.Tensor:
        values: torch.Tensor = file.get_slice(name)[start + offset : start + offset + length]
        return values

    piece.weight[into].copy_(part("weights", extent.weight))
    if trainable:
        if manifest.precision != "fp32":
            piece.master[into].copy_(part("master", extent.trained))
        for k, state in enumerate(piece.states):
            state[into].copy_(part(f"state-{k}", extent.trained))


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
    if (manifest.optimizer, manifest.states) != (optimizer, len(store.states)):
        raise CheckpointError(
            f"{where} was saved with {manifest.optimizer} of {manifest.states} states, "
            f"the engine has {optimizer} of {len(store.states)}"
        )
