"""Updates of layers whose master weights and states are on disk, tile by tile, overlapped with the step.

    waiting -> read into a free staging buffer -> updated by the host worker -> written -> the buffer is free again

Tiles move independently, so that the disk reads ahead and writes behind while the worker updates. Tiles of the layers needed
first go first. A layer's weights are new when its last tile is updated, and its next forward waits only for that. A tile is not
read again before it was written. An error anywhere fails the worker, and with it every gate.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from scrimp.chunks import DISK, Gate, Piece, Rules, Slot, Spans, Store, Updater, Worker, region_requests

WRITE, READ = 0, 1  # writes go first, because a write frees a staging buffer


@dataclass(kw_only=True)
class _Update:
    """One layer's update in one step."""

    layer: int
    slots: list[tuple[Slot, int]]  # with the number of updates of each, this one included
    step: int
    scale: torch.Tensor | None
    come: list[torch.cuda.Event]  # its gradients have arrived after these
    updated: Gate
    written: Gate
    to_update: int = 0  # tiles
    to_write: int = 0


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """Elements [start, stop) of a layer's arenas on this rank."""

    update: _Update
    start: int
    stop: int

    @property
    def key(self) -> tuple[int, int]:
        return self.update.layer, self.start


class DiskUpdates:
    """Runs the updates. `seconds` and `numel`: worker time spent on them, and elements updated."""

    def __init__(self, store: Store, worker: Worker, updater: Updater, rules: Rules) -> None:
        self.seconds, self.numel = 0.0, 0
        self._store = store
        self._worker = worker
        self._updater = updater
        self._rules = rules
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, _Tile]] = []
        self._count = itertools.count()
        self._busy: set[tuple[int, int]] = set()  # tiles on their way from disk and back
        self._moving = 0  # batches that are read or written now
        self._over = False
        if store.host_room_nbytes is not None:
            store.spill.within(store.host_room_nbytes - _resident_nbytes(store))

    def start(self, layer: int, slots: list[Slot], numbers: list[int], step: int, scale: torch.Tensor | None) -> None:
        """Begin a layer's update; `store.gates` has its gate."""
        store = self._store
        if layer in store.gates:  # other parameters of it started earlier in this step
            store.gates[layer].wait()
        for tensor in store.spill.make():
            store.own(tensor)
        update = _Update(
            layer=layer,
            slots=list(zip(slots, numbers, strict=True)),
            step=step,
            scale=scale,
            come=store.take_coming_down(layer),
            updated=self._worker.promise(),
            written=self._worker.promise(),
        )
        store.gates[layer] = update.updated
        pending = [gate for gate in store.spill.writing.get(layer, []) if not gate.open]
        store.spill.writing[layer] = [*pending, update.written]
        numel = store.shards.trained_numel(layer)
        found = [_Tile(update=update, start=start, stop=stop) for start, stop in store.spill.tiles(numel)]
        found = [tile for tile in found if any(True for _ in self._spans(tile))]
        if not found:  # this rank holds nothing of these parameters
            self._worker.keep(update.updated)
            self._worker.keep(update.written)
            return
        update.to_update = update.to_write = len(found)
        with self._changed:
            for tile in found:
                heapq.heappush(self._waiting, (layer, next(self._count), tile))
            self._next()

    def drop(self) -> None:
        """Start nothing more, and wait for running reads and writes. The content of the disk is void afterwards."""
        with self._changed:
            self._over = True
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._moving)
        self._store.spill.writing.clear()
        self._store.spill.let_go()

    def _next(self) -> None:
        """Read waiting tiles into free staging buffers; called with the lock held."""
        later = []
        while self._waiting and self._store.spill.free:
            row = heapq.heappop(self._waiting)
            tile = row[2]
            if tile.key in self._busy:  # still being written
                later.append(row)
                continue
            self._busy.add(tile.key)
            self._move(tile, self._store.spill.free.pop(), READ)
        for row in later:
            heapq.heappush(self._waiting, row)

    def _move(self, tile: _Tile, stage: list[torch.Tensor], way: int) -> None:
        """Start a read or a write; called with the lock held."""
        placement, spill = self._store.placements[tile.update.layer], self._store.spill
        assert placement.file is not None
        tensors = spill.part(placement, stage, slice(0, tile.stop - tile.start))
        batch = region_requests(placement.file, tensors, at=spill.at(placement, tile.start), write=way == WRITE)
        spill.queue.start(way, batch, partial(self._moved, tile, stage, way))
        self._moving += 1

    def _moved(self, tile: _Tile, stage: list[torch.Tensor], way: int, error: BaseException | None) -> None:
        """Called in a disk thread when a tile is read or written."""
        try:
            if error is not None:
                self._fail(error)
            elif way == READ:
                self._count_bytes(tile, stage, way)
                self._worker.submit(tile.update.layer, partial(self._update, tile, stage), tile.update.come)
            else:
                self._count_bytes(tile, stage, way)
                self._written(tile, stage)
        except BaseException as caught:
            self._fail(caught)
        finally:
            with self._changed:
                self._moving -= 1
                self._changed.notify_all()

    def _count_bytes(self, tile: _Tile, stage: list[torch.Tensor], way: int) -> None:
        moved = self._store.spill.part(self._store.placements[tile.update.layer], stage, slice(0, tile.stop - tile.start))
        nbytes = sum(tensor.nbytes for tensor in moved)
        with self._changed:
            if way == READ:
                self._store.traffic.read_nbytes += nbytes
            else:
                self._store.traffic.written_nbytes += nbytes

    def _written(self, tile: _Tile, stage: list[torch.Tensor]) -> None:
        """The tile is on disk, so its staging buffer takes the next one."""
        update = tile.update
        with self._changed:
            self._busy.remove(tile.key)
            if not self._over:
                self._store.spill.free.append(stage)  # before the gate opens, whose waiter may free the buffers
                self._next()
            update.to_write -= 1
            if not update.to_write:
                self._worker.keep(update.written)

    def _update(self, tile: _Tile, stage: list[torch.Tensor]) -> None:
        """Update one tile, in the worker."""
        update = tile.update
        try:
            self._store.before_update(update.layer)
            start = time.perf_counter()
            for slot, count, piece, own_master in self._pieces(tile, stage):
                optimizer = self._rules.of(slot.name, update.step)
                self._updater.apply(optimizer, update.step, count, piece, update.scale, own_master=own_master)
                self.numel += piece.master.numel()
            self.seconds += time.perf_counter() - start
            with self._changed:
                if not self._over:
                    self._move(tile, stage, WRITE)
            update.to_update -= 1
            if not update.to_update:
                self._worker.keep(update.updated)
        except BaseException as error:
            self._fail(error)
            raise

    def _spans(self, tile: _Tile) -> Iterator[tuple[Slot, int, Spans]]:
        """The part of each slot in a tile. It begins at a multiple of 64 elements of the parameter, as tiles and slots do, so
        that no bit depends on the size of tiles."""
        for slot, count in tile.update.slots:
            for spans in self._store.shards.pieces(tile.update.layer, slot):
                start, stop = max(spans.states.start, tile.start), min(spans.states.stop, tile.stop)
                if start < stop:
                    first, length = start - spans.states.start, stop - start
                    yield slot, count, Spans(*(slice(each.start + first, each.start + first + length) for each in spans))

    def _pieces(self, tile: _Tile, stage: list[torch.Tensor]) -> Iterator[tuple[Slot, int, Piece, bool]]:
        placement = self._store.placements[tile.update.layer]
        own_master = placement.weights.dtype == torch.float32
        for slot, count, spans in self._spans(tile):
            weight = placement.weights[spans.weights]
            here = slice(spans.states.start - tile.start, spans.states.stop - tile.start)
            tensors = self._store.spill.part(placement, stage, here)
            piece = Piece(
                inside=spans.inside,
                weight=weight,
                gradient=weight if placement.gradients is None else placement.gradients[spans.gradients],
                master=weight if own_master else tensors[0],
                states=tensors if own_master else tensors[1:],
            )
            yield slot, count, piece, own_master

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._over = True
            self._waiting.clear()
        self._worker.fail(error)


def _resident_nbytes(store: Store) -> int:
    """Host bytes that all placements need permanently."""
    rows = [(store.placement_nbytes(k), placement.tier == DISK) for k, placement in enumerate(store.placements)]
    return sum(weights + gradients + (0 if on_disk else rest) for (weights, gradients, rest), on_disk in rows)
