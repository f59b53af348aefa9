"""The state at one point of training, for a save in the background: a layer is written from where it is, or copied before.

A layer may be updated again only once it is safe: copied, or written. First the save copies layers as far as the host has room,
in the order in which updates will come. Then it writes the layers that it could not copy, from where they are; their next
updates wait for that. Last it writes the copies, and frees each. An update that comes before the copy of its layer makes the copy
itself. Layers on disk are never copied: their masters and states are on disk because the host has no room for them.

All methods but `write` are called by the threads that train.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from scrimp.checkpoint._layers import TILE, InMemory, OnDisk, layer_rows
from scrimp.checkpoint._write import ShardFile
from scrimp.chunks import DEVICE, DISK, HOST, STREAMED, Gate, Opened, Store, arena, carry

GLANCE = 1e-3  # seconds between two checks of updates that are not done yet
NICER = 10  # of the thread that writes, once updates no longer wait for copies


class At(Enum):
    """Of a layer: not safe yet, being copied or written, copied, written."""

    LIVE, BUSY, COPIED, WRITTEN = range(4)


@dataclass(kw_only=True)
class _Layer:
    index: int
    after: list[Gate]  # updates of it that were submitted before the save
    nbytes: int  # of a copy
    on_disk: bool
    at: At = At.LIVE
    wanted: bool = False  # an update waits for it
    data: Opened | None = field(default=None, repr=False)

    @property
    def ready(self) -> bool:
        return all(gate.open for gate in self.after)

    @property
    def safe(self) -> bool:
        return self.at in (At.COPIED, At.WRITTEN)


class Snapshot:
    """`room_nbytes`: the most that copies may take on the host. `first_updated`: layers in the order in which the next updates
    come."""

    def __init__(self, store: Store, room_nbytes: int, first_updated: list[int]) -> None:
        self._store, self._ledger, self._room_nbytes = store, store.books.host, room_nbytes
        self._changed = threading.Condition()
        self._over = self._no_more = self._lowered = False
        self.used_nbytes = self.peak_nbytes = 0  # of copies
        self._waited = self._lap = 0.0  # seconds that updates wait: for copies, which they may make themselves, or for the writer
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        if store.device.type == "cuda":
            self._event = torch.cuda.current_stream(store.device).record_event()
            self._stream = torch.cuda.Stream(store.device)  # type: ignore[no-untyped-call]
        self._layers = {layer: self._row(layer) for layer in first_updated if any(layer_rows(store, layer))}
        self._buffer_nbytes = buffer_nbytes(store)
        self._room_nbytes -= self._buffer_nbytes
        self._ledger.charge("snapshot", self._buffer_nbytes)
        store.before_update, store.before_edit, store.free_host = self.before_update, self.before_edit, self.free_host

    def _row(self, layer: int) -> _Layer:
        store, placement = self._store, self._store.placements[layer]
        gate = store.gates.get(layer)
        if gate is not None and not (isinstance(gate, Gate) and placement.tier in (HOST, DISK)):
            store.at_rest(layer)
            gate = None
        if placement.tier == STREAMED:
            store.at_rest(layer)  # states are on their way back to the host
        after = [*([gate] if gate is not None else []), *store.spill.writing.get(layer, [])]
        on_disk = placement.file is not None
        nbytes = 0 if on_disk else sum(tensor.nbytes for tensor in self._changing(layer))
        return _Layer(index=layer, after=after, nbytes=nbytes, on_disk=on_disk)

    def _changing(self, layer: int) -> list[torch.Tensor]:
        """What an update changes and a save reads; nothing in a frozen layer."""
        if not self._store.shards.trained_numel(layer):
            return []
        data = self._store.direct(layer)
        return [data.master, *data.states]

    # For the threads that train.

    def before_update(self, layer: int) -> None:
        """Returns once the layer is safe: copies it, or waits until it is written."""
        row = self._layers.get(layer)
        if row is None or row.safe or self._over:
            return
        begin = time.perf_counter()
        safe = self._copy(row)
        with self._changed:
            if not safe:
                row.wanted = True
                self._wait_for(lambda: row.safe)
            self._waited += time.perf_counter() - begin

    def before_edit(self, layer: int) -> None:
        """Returns once the layer may be edited or moved: copied, or written if it has frozen weights, which are not copied."""
        row = self._layers.get(layer)
        if row is None or self._over or row.at is At.WRITTEN:
            return
        space, own_master = self._store.table.layers[layer], self._store.dtype_of(layer) == torch.float32
        if row.nbytes and (own_master or all(slot.trainable for slot in space.slots)):
            self.before_update(layer)
            return
        with self._changed:
            begin, row.wanted = time.perf_counter(), True
            self._wait_for(lambda: row.at is At.WRITTEN)
            self._waited += time.perf_counter() - begin

    def free_host(self) -> None:
        """The step needs the host memory: make no more copies, and wait until those that exist are written."""
        with self._changed:
            begin, self._no_more = time.perf_counter(), True
            self._wait_for(lambda: not self.used_nbytes)
            self._waited += time.perf_counter() - begin

    def _wait_for(self, done: Callable[[], bool]) -> None:
        self._changed.notify_all()
        self._changed.wait_for(lambda: done() or self._over)

    def lap(self) -> float:
        """Seconds since the last call that updates waited for copies or for the writer."""
        before, self._lap = self._lap, self._waited
        return self._lap - before

    # For the thread that writes.

    def write(self, file: ShardFile) -> None:
        """Write all layers. Raises the error of an update on which a layer depends."""
        with self._beside():
            while (chosen := self._next()) is not None:
                row, copy = chosen
                for gate in row.after:
                    gate.wait()
                if copy:
                    self._copy(row)
                else:
                    self._write(row, file)

    def close(self) -> None:
        """Free all copies, and let all updates go on."""
        with self._changed:
            self._over = True
            freed, self.used_nbytes = self.used_nbytes + self._buffer_nbytes, 0
            self._buffer_nbytes = 0
            for row in self._layers.values():
                row.data = None
            self._changed.notify_all()
        self._ledger.free("snapshot", freed)

    def _next(self) -> tuple[_Layer, bool] | None:
        """The next layer, and whether to copy it now; None after the last."""
        with self._changed:
            while True:
                rest = [row for row in self._layers.values() if row.at is not At.WRITTEN]
                if not rest or self._over:
                    return None
                live = [row for row in rest if row.at is At.LIVE and row.ready]
                wanted = next((row for row in rest if row.wanted and (row in live or row.at is At.COPIED)), None)
                if wanted is not None:
                    return wanted, False
                row = next((row for row in live if row.nbytes and self._fits(row)), None)
                if row is not None:
                    return row, True
                waits = [row for row in rest if row.at is At.LIVE and row.nbytes]
                if not waits:
                    self._step_back()
                elif any(self._fits(row) for row in waits):  # once the update before the save is done
                    self._changed.wait(GLANCE)
                    continue
                row = next(iter(live), None) or next((row for row in rest if row.at is At.COPIED), None)
                if row is not None:
                    return row, False
                self._changed.wait(GLANCE)

    def _write(self, row: _Layer, file: ShardFile) -> None:
        with self._changed:
            if row.at not in (At.LIVE, At.COPIED):
                return  # an update copies it now
            data, moves = row.data, row.at is At.LIVE
            if moves:
                row.at = At.BUSY
        try:
            if row.on_disk:
                OnDisk(store=self._store, layer=row.index).append_to(file)
            else:
                InMemory(store=self._store, data=data or self._store.direct(row.index), rounded=True).append_to(file)
        finally:
            del data
            with self._changed:
                row.at, row.data = At.WRITTEN, None
                freed = 0 if moves or self._over else row.nbytes
                self.used_nbytes -= freed
                self._ledger.free("snapshot", freed)
                self._changed.notify_all()

    # Copies.

    def _fits(self, row: _Layer) -> bool:
        return not row.on_disk and not self._no_more and self.used_nbytes + row.nbytes <= self._room_nbytes

    def _copy(self, row: _Layer) -> bool:
        """Whether the layer is safe now; False if there is no room for a copy of it."""
        with self._changed:
            self._changed.wait_for(lambda: row.at is not At.BUSY or self._over)
            if row.safe or self._over:
                return True
            if not self._fits(row):
                return False
            row.at = At.BUSY
            self.used_nbytes += row.nbytes
            self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes)
            self._ledger.charge("snapshot", row.nbytes)
        data = None
        try:
            live = self._store.direct(row.index)
            data = replace(live, master=_copied(live.master), states=[_copied(state) for state in live.states])
            if live.own_master:
                data = replace(data, weights=data.master)
        finally:
            with self._changed:
                row.at, row.data = (At.LIVE, None) if data is None else (At.COPIED, data)
                if data is None and not self._over:
                    self.used_nbytes -= row.nbytes
                    self._ledger.free("snapshot", row.nbytes)
                if self._over:
                    row.data = None
                self._changed.notify_all()
        return True

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On CUDA: a stream of its own, after the work that was submitted before the save."""
        context: AbstractContextManager[object] = nullcontext()
        if (
            self._stream is not None
            and self._event is not None
            and any(p.tier in (DEVICE, STREAMED) for p in self._store.placements)
        ):
            self._stream.wait_event(self._event)
            context = torch.cuda.stream(self._stream)
        with context:
            yield

    def _step_back(self) -> None:
        """Lowers the priority of the calling thread, once: no update waits for it any more."""
        if not self._lowered:
            self._lowered = True
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICER)


def buffer_nbytes(store: Store) -> int:
    """Bytes on the host through which layers on disk are read."""
    sizes = [store.shards.trained_numel(k) for k, each in enumerate(store.placements) if each.file is not None]
    return 2 * 4 * min(TILE, max(sizes, default=0))  # a part of the masters, and what is made of it


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    into = arena(tensor.numel(), tensor.dtype)
    carry(into, tensor.detach())
    return into
