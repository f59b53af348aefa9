"""Saving: every rank writes its arenas to a folder beside the goal; rank 0 writes the manifest and renames.

At every moment either the old checkpoint or the new one is complete: the old one is moved aside only when the new one
needs nothing but its name, and a reader that finds no checkpoint takes the one moved aside.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from scrimp.checkpoint._manifest import NAME, Entry, Extent, Manifest, checksum
from scrimp.chunks._store import Store

ASIDE, UNFINISHED = ".previous", ".unfinished"


def save(
    folder: str | Path,
    store: Store,
    *,
    optimizer: str,
    steps: int,
    skipped: int,
    counts: Mapping[str, int],
    rng: torch.Tensor,
    buffers: Mapping[str, torch.Tensor],
) -> None:
    goal = Path(folder)
    work = goal.with_name(goal.name + UNFINISHED)
    wire = store.wire
    if wire.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    wire.meet()
    name = f"rank-{wire.rank}.safetensors"
    tensors = {"weights": store.weights, "rng": rng}
    if not store.own_master:
        tensors["master"] = store.master
    tensors.update({f"state-{k}": state for k, state in enumerate(store.states)})
    if wire.rank == 0:  # buffers are the same everywhere, as DDP has them
        tensors.update({f"buffer.{key}": buffer.detach().cpu().clone() for key, buffer in buffers.items()})
    save_file(tensors, work / name)
    _flush(work / name)
    checksums = torch.empty(32 * wire.world, dtype=torch.uint8)
    wire.gather(torch.frombuffer(bytearray(checksum(work / name)), dtype=torch.uint8), checksums)
    if wire.rank == 0:
        rows = checksums.view(wire.world, 32)
        manifest = Manifest(
            precision=store.precision,
            optimizer=optimizer,
            states=len(store.states),
            steps=steps,
            skipped=skipped,
            files=tuple((f"rank-{rank}.safetensors", bytes(rows[rank].tolist()).hex()) for rank in range(wire.world)),
            entries=_entries(store, counts),
        )
        (work / NAME).write_text(manifest.to_json())
        _flush(work / NAME)
        _commit(work, goal)
    wire.meet()


def _entries(store: Store, counts: Mapping[str, int]) -> dict[str, Entry]:
    entries = {}
    for index, layer in enumerate(store.table.layers):
        for slot in layer.slots:
            extents = tuple(
                Extent(
                    start=inside.start,
                    length=inside.stop - inside.start,
                    rank=rank,
                    weight=weight.start,
                    trained=trained.start if slot.trainable else -1,
                )
                for rank in range(store.wire.world)
                for inside, weight, trained in store.shards.of_rank(rank).pieces(index, slot)
            )
            count = counts.get(slot.name, 0)
            entries[slot.name] = Entry(shape=slot.shape, trainable=slot.trainable, count=count, extents=extents)
    return entries


def _commit(work: Path, goal: Path) -> None:
    aside = goal.with_name(goal.name + ASIDE)
    _flush(work)
    if goal.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(goal, aside)
    os.replace(work, goal)
    _flush(goal.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _flush(path: Path) -> None:
    """Down to the disk, a folder's entries too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
