"""Saving: every rank writes its shards to a temporary folder next to the target; rank 0 writes the manifest and renames.

At any time either the old checkpoint or the new one is complete: the old one is renamed only when the new one needs nothing but
its name, and a reader that finds no checkpoint reads the renamed one.

`Save(...)` is a collective. `Save.run` is none, so it may run in a thread beside training.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from scrimp.checkpoint._agree import Agreement, together
from scrimp.checkpoint._layers import InMemory, layer_rows
from scrimp.checkpoint._manifest import NAME, Entry, Extent, FileRow, Manifest, checked_extra
from scrimp.checkpoint._tiles import extents_of
from scrimp.checkpoint._write import Named, Row, ShardFile, file_nbytes, no_room
from scrimp.chunks import Slot, Store
from scrimp.errors import CheckpointError

ASIDE, UNFINISHED = ".previous", ".unfinished"
_WRITING: set[Path] = set()  # folders that this process is writing


def being_written(folder: Path) -> bool:
    return Path(os.path.abspath(folder)) in _WRITING


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a checkpoint has beside the layers. `also`: further tensors of this rank, under their own names. `extra`: JSON for the
    manifest."""

    optimizer: str
    steps: int
    skipped: int
    counts: Mapping[str, int]
    loss_scale: tuple[float, int]
    rng: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    groups: Sequence[Mapping[str, Any]] = ()
    also: Iterable[Named] = ()
    extra: Mapping[str, Any] | None = field(default=None)


class Save:
    """One checkpoint of one rank. Making it checks the target and the room on its disk, together with the other ranks."""

    def __init__(self, folder: str | Path, store: Store, content: Content) -> None:
        self.goal = goal = Path(os.path.abspath(folder))
        self._work = work = goal.with_name(goal.name + UNFINISHED)
        self._store = store
        wire, extra = store.ranks, dict[str, Any]()
        with together(wire, goal):
            extra = checked_extra(content.extra)
            if wire.rank == 0:
                check_goal(goal)
                shutil.rmtree(work, ignore_errors=True)
                work.mkdir(parents=True)
        self._small = list(_small(store, content))
        self._rows: list[Row] = [row[:3] for row in self._small]
        self._rows += [row for layer in written_layers(store) for row, _ in layer_rows(store, layer)]
        self.nbytes = int(wire.every(torch.tensor([file_nbytes(self._rows)])).sum())  # of all ranks
        with together(wire, goal):
            if wire.rank == 0:
                self._check_room()
        self._manifest = Manifest(
            precision=store.precision,
            optimizer=content.optimizer,
            states=store.optimizer.states,
            steps=content.steps,
            skipped=content.skipped,
            loss_scale=content.loss_scale,
            files=(),
            entries=_entries(store, content.counts) if wire.rank == 0 else {},
            state=store.optimizer.state,
            groups=tuple(map(dict, content.groups)),
            extra=extra,
        )
        self._agreement = Agreement(wire, goal)
        _WRITING.add(work)

    @property
    def agreement(self) -> Agreement:
        return self._agreement

    def run(self, layers: Callable[[ShardFile], None] | None = None) -> None:
        """Write this rank's file, whose layers come from `layers`, or from the store as they are; wait for the other ranks."""
        try:
            self._agreement.run(lambda: self._write(layers or self._live), self._finish, self._undo, meet=layers is None)
        finally:
            _WRITING.discard(self._work)

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks that this one writes nothing."""

        def fail(_: ShardFile) -> None:
            raise error

        with suppress(BaseException):
            self.run(fail)

    def _write(self, layers: Callable[[ShardFile], None]) -> dict[str, Any]:
        file = ShardFile(self._work / f"rank-{self._store.ranks.rank}.safetensors", self._rows)
        try:
            for name, _, _, make in self._small:
                file.append(name, make())
            layers(file)
            return asdict(file.close())
        finally:
            file.abandon()

    def _live(self, file: ShardFile) -> None:
        for layer in written_layers(self._store):
            with self._store.opened(layer) as data:
                InMemory(store=self._store, data=data).append_to(file)

    def _finish(self, rows: list[Any]) -> None:
        manifest = replace(self._manifest, files=tuple(FileRow(**row) for row in rows))
        path = self._work / NAME
        try:
            path.write_text(manifest.to_json())
            flush(path)
        except OSError as error:
            free = shutil.disk_usage(self._work).free
            raise no_room(path, len(manifest.to_json()), free, error.strerror or "") from error
        commit(self._work, self.goal)

    def _undo(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)

    def _check_room(self) -> None:
        free = shutil.disk_usage(self._work).free
        if free < self.nbytes:
            self._undo()
            raise no_room(self.goal, self.nbytes, free, "the checkpoint that it replaces stays until the new one is complete")


def written_layers(store: Store) -> range:
    """The layers of which this rank writes tensors: none, if the first group of ranks that shard the model has the same."""
    if store.tiling is None and store.ranks.rank >= store.wire.world:
        return range(0)
    return range(len(store.table.layers))


def check_goal(goal: Path) -> None:
    """Raises unless the target is new or holds nothing but a checkpoint, because it is replaced."""
    if goal.exists() and not goal.is_dir():
        raise CheckpointError(f"{goal} is a file; save to a folder that is new, or holds a checkpoint")
    others = [p.name for p in goal.iterdir() if p.name != NAME and not p.match("rank-*.safetensors")] if goal.exists() else []
    if others:
        raise CheckpointError(
            f"{goal} holds {sorted(others)[:3]}, which are no part of a checkpoint and would be lost; save to a folder in it"
        )


def _small(store: Store, content: Content) -> Iterable[Named]:
    """The tensors that this rank writes beside its layers, each made only when it is written."""
    for key, state in content.rng.items():
        yield f"rng.{key}", state.dtype, tuple(state.shape), state.detach
    if store.ranks.rank == 0:  # buffers are the same on all ranks, as with DDP
        for key, buffer in content.buffers.items():
            yield f"buffer.{key}", buffer.dtype, tuple(buffer.shape), buffer.detach
    yield from content.also


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


def commit(work: Path, goal: Path) -> None:
    aside = goal.with_name(goal.name + ASIDE)
    flush(work)
    if goal.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(goal, aside)
    os.replace(work, goal)
    flush(goal.parent)
    shutil.rmtree(aside, ignore_errors=True)


def flush(path: Path) -> None:
    """Flushes a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
