"""Saving: every rank writes its shards to a temporary folder next to the target; rank 0 writes the manifest and renames.

At any time either the old checkpoint or the new one is complete: the old one is renamed only when the new one needs nothing but
its name, and a reader that finds no checkpoint reads the renamed one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from scrimp.checkpoint._manifest import NAME, Entry, Extent, Manifest, checked_extra
from scrimp.checkpoint._tiles import extents_of, written, written_numel
from scrimp.checkpoint._write import Named, write
from scrimp.chunks import Opened, Slot, Store, Wire
from scrimp.errors import CheckpointError, ScrimpError

ASIDE, UNFINISHED = ".previous", ".unfinished"
_WRITING: set[Path] = set()  # folders that this process is writing


def being_written(folder: Path) -> bool:
    return Path(os.path.abspath(folder)) in _WRITING


def save(
    folder: str | Path,
    store: Store,
    *,
    optimizer: str,
    steps: int,
    skipped: int,
    counts: Mapping[str, int],
    loss_scale: tuple[float, int],
    rng: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    groups: Sequence[Mapping[str, Any]] = (),
    also: Iterable[Named] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint. `also`: further tensors of this rank, under their own names. `extra`: JSON for the manifest."""
    goal = Path(os.path.abspath(folder))
    work = goal.with_name(goal.name + UNFINISHED)
    wire = store.ranks
    more: dict[str, Any] = {}
    with _together(wire, goal):
        more = checked_extra(extra)
        if wire.rank == 0:
            _check_goal(goal)
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
    _WRITING.add(work)
    try:
        name = f"rank-{wire.rank}.safetensors"
        mine = bytes(32)
        with _together(wire, goal):
            with _OneLayer(store) as layers:
                mine = write(work / name, chain(_tensors(store, layers, rng, buffers), also))
            _flush(work / name)
        checksums = wire.every(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        with _together(wire, goal):
            if wire.rank == 0:
                _finish(goal, work, store, checksums, optimizer, steps, skipped, counts, loss_scale, groups, more)
    finally:
        _WRITING.discard(work)


def _finish(
    goal: Path,
    work: Path,
    store: Store,
    checksums: torch.Tensor,
    optimizer: str,
    steps: int,
    skipped: int,
    counts: Mapping[str, int],
    loss_scale: tuple[float, int],
    groups: Sequence[Mapping[str, Any]],
    extra: dict[str, Any],
) -> None:
    manifest = Manifest(
        precision=store.precision,
        optimizer=optimizer,
        states=store.optimizer.states,
        steps=steps,
        skipped=skipped,
        loss_scale=loss_scale,
        files=tuple((f"rank-{rank}.safetensors", bytes(row.tolist()).hex()) for rank, row in enumerate(checksums)),
        entries=_entries(store, counts),
        state=store.optimizer.state,
        groups=tuple(map(dict, groups)),
        extra=extra,
    )
    (work / NAME).write_text(manifest.to_json())
    _flush(work / NAME)
    _commit(work, goal)


@contextmanager
def _together(wire: Wire, goal: Path) -> Iterator[None]:
    """Turns an error on one rank into an error on all ranks at once, without a time-out."""
    error: BaseException | None = None
    try:
        yield
    except (OSError, ScrimpError) as caught:
        error = caught
    failed = wire.every(torch.tensor([int(error is not None)])).flatten().nonzero().flatten().tolist()
    if error is not None:
        raise error if isinstance(error, ScrimpError) else CheckpointError(f"{goal} could not be written: {error}") from error
    if failed:
        raise CheckpointError(f"{goal} could not be written: rank {failed[0]} failed; see the error there")


def _check_goal(goal: Path) -> None:
    """Raises unless the target is new or holds nothing but a checkpoint, because it is replaced."""
    if goal.exists() and not goal.is_dir():
        raise CheckpointError(f"{goal} is a file; save to a folder that is new, or holds a checkpoint")
    others = [p.name for p in goal.iterdir() if p.name != NAME and not p.match("rank-*.safetensors")] if goal.exists() else []
    if others:
        raise CheckpointError(
            f"{goal} holds {sorted(others)[:3]}, which are no part of a checkpoint and would be lost; save to a folder in it"
        )


class _OneLayer(ExitStack):
    """Opens layers one at a time, each once for all of its tensors, because a layer on disk is read as a whole."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._data: Opened | None = None

    def part(self, layer: int, which: str | int) -> Callable[[], torch.Tensor]:
        def make() -> torch.Tensor:
            if self._data is None or self._data.layer != layer:
                self._data = None
                self.close()
                self._data = self.enter_context(self._store.opened(layer))
            if self._store.tiling is not None:
                return written(self._store, self._data, which)
            return _on_host(self._data.states[which] if isinstance(which, int) else getattr(self._data, which))

        return make


def _tensors(
    store: Store, layers: _OneLayer, rng: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> Iterator[Named]:
    """The tensors that this rank writes, each made only when it is written."""
    for key, state in rng.items():
        yield f"rng.{key}", state.dtype, tuple(state.shape), partial(_on_host, state)
    if store.ranks.rank == 0:  # buffers are the same on all ranks, as with DDP
        for key, buffer in buffers.items():
            yield f"buffer.{key}", buffer.dtype, tuple(buffer.shape), partial(_on_host, buffer)
    if store.tiling is None and store.ranks.rank >= store.wire.world:
        return  # the first group of ranks that shard the model has written the same weights
    for layer in range(len(store.table.layers)):
        numel, trained = store.shards.numel(layer), store.shards.trained_numel(layer)
        if store.tiling is not None:
            numel, trained = written_numel(store, layer)
        wide = store.dtype_of(layer) == torch.float32
        yield f"weights.{layer}", store.dtype_of(layer), (numel,), layers.part(layer, "weights")
        if not wide:
            yield f"master.{layer}", torch.float32, (trained,), layers.part(layer, "master")
        for k, field in enumerate(store.optimizer.fields):
            yield f"state-{k}.{layer}", field.dtype, (field.numel(trained),), layers.part(layer, k)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _entries(store: Store, counts: Mapping[str, int]) -> dict[str, Entry]:
    entries = {}
    for index, layer in enumerate(store.table.layers):
        for slot in layer.slots:
            extents = _extents(store, index, slot) if store.tiling is None else extents_of(store, index, slot)
            entries[slot.name] = Entry(
                shape=slot.shape if store.tiling is None else store.tiling.shape(slot.name),
                trainable=slot.trainable,
                own_master=store.dtype_of(index) == torch.float32,
                count=counts.get(slot.name, 0),
                layer=index,
                extents=extents,
            )
    return entries


def _extents(store: Store, layer: int, slot: Slot) -> tuple[Extent, ...]:
    return tuple(
        Extent(start=spans.inside.start, length=spans.inside.stop - spans.inside.start, rank=rank, place=spans.states.start)
        for rank in range(store.wire.world)
        for spans in store.shards.of_rank(rank).pieces(layer, slot)
    )


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
    """Flushes a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
