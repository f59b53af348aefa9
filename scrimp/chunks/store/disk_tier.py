"""The disk tier of one rank: I/O threads, staging buffers on the host, and pending writes of all its spill files.

An update moves tiles of fixed size through a few staging buffers, however large a layer is. Adopting the model, checkpoints and
undoing a step need a layer as a whole. They get a buffer for all of it, after pending writes are done and the update's buffers
are freed, so the host never holds both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from scrimp.chunks.spill.file import BLOCK, SpillFile
from scrimp.chunks.spill.queue import SpillQueue, region_requests
from scrimp.chunks.store.placement import Opened, Placement, optimized
from scrimp.chunks.tables.shards import Shards
from scrimp.chunks.tables.state_codec import Field
from scrimp.chunks.transfer.copy_streams import Traffic
from scrimp.chunks.transfer.host_arena import arena
from scrimp.chunks.worker.worker import Gate
from scrimp.ledger import Ledger

TILE = 4 << 20  # most elements of a layer that are updated at a time; a multiple of the spill file's blocks
STAGES = 3  # one buffer is read into, one updated, one written


def block_numel() -> int:
    """Elements under one checksum, in each region of a file; a tile is a whole number of blocks in all regions."""
    return BLOCK // 4


def tile_numel(largest_numel: int) -> int:
    """Tile size such that all staging buffers together are no larger than the largest layer, if it has a block for each."""
    block = block_numel()
    return max(block, min(TILE, largest_numel // STAGES // block * block))


def spill_file(folder: Path, fields: tuple[Field, ...], numel: int, label: str) -> SpillFile:
    """A spill file with a region for each field of so many elements."""
    regions = {str(k): field.nbytes(numel) for k, field in enumerate(fields)}
    blocks = {str(k): field.nbytes(block_numel()) for k, field in enumerate(fields)}
    return SpillFile(folder, regions, label, blocks)


class Spilling:
    """Staging and pending writes. `placements`: of all layers, on disk or not. `fields`: of the optimizer. `writing`: by layer, a
    gate for each update whose writes are pending. Only the training thread uses this, except `free`, which the update threads use
    under their lock."""

    def __init__(
        self, placements: list[Placement], shards: Shards, fields: tuple[Field, ...], host: Ledger, traffic: Traffic
    ) -> None:
        self.queue = SpillQueue()
        self.traffic = traffic
        self.writing: dict[int, list[Gate]] = {}
        self.free: list[list[torch.Tensor]] = []  # staging buffers
        self.stages = STAGES
        self._placements = placements
        self._shards = shards
        self._fields = fields
        self._host = host
        self._made = 0
        on_disk = [k for k, placement in enumerate(placements) if placement.file is not None]
        self._largest = max((shards.trained_numel(k) for k in on_disk), default=0)
        # Fields of a staging buffer: a layer without masters on disk uses only the last ones.
        self._staged = max((self._kept(placements[k]) for k in on_disk), key=len, default=())
        self._whole_nbytes = max((sum(file.regions.values()) for file in self.files), default=0)
        self.tile = tile_numel(self._largest)
        weakref.finalize(self, self.queue.close)

    @property
    def files(self) -> list[SpillFile]:
        return [placement.file for placement in self._placements if placement.file is not None]

    @property
    def stage_nbytes(self) -> int:
        return sum(field.nbytes(min(self.tile, self._largest)) for field in self._staged)

    @property
    def need_nbytes(self) -> int:
        """Host bytes for staging: tiles of an update, or one whole layer."""
        return max(self.stage_nbytes * self.stages, self._whole_nbytes)

    @property
    def buffered_because(self) -> str | None:
        """Why files are read and written through the page cache, if they are."""
        return next((file.buffered_because for file in self.files if file.buffered_because), None)

    def within(self, room_nbytes: int) -> None:
        """Use as many staging buffers as fit."""
        self.stages = max(1, min(STAGES, room_nbytes // max(1, self.stage_nbytes)))

    def tiles(self, numel: int) -> list[tuple[int, int]]:
        """[start, stop) of a layer's tiles."""
        return [(start, min(start + self.tile, numel)) for start in range(0, numel, self.tile)]

    def make(self) -> list[torch.Tensor]:
        """Allocate the staging buffers of updates, unless they exist; returns the new tensors."""
        if self._made:
            return []
        self._made = self.stage_nbytes * self.stages
        self._host.charge("temporaries", self._made)
        numel = min(self.tile, self._largest)
        self.free = [[arena(field.numel(numel), field.dtype) for field in self._staged] for _ in range(self.stages)]
        return [tensor for stage in self.free for tensor in stage]

    def part(self, placement: Placement, stage: list[torch.Tensor], elements: slice) -> list[torch.Tensor]:
        """The part of a staging buffer for some elements of a tile: masters, if they are on disk, and states."""
        kept = self._kept(placement)
        return [tensor[field.span(elements)] for tensor, field in zip(stage[len(stage) - len(kept) :], kept, strict=True)]

    def at(self, placement: Placement, element: int) -> list[int]:
        """The byte position of an element, the first of a block, in each region."""
        return [field.nbytes(element) for field in self._kept(placement)]

    def _kept(self, placement: Placement) -> tuple[Field, ...]:
        return optimized(placement.weights.dtype, self._fields)

    def let_go(self) -> None:
        """Free the staging buffers, which must be unused."""
        self.free.clear()
        self._host.free("temporaries", self._made)
        self._made = 0

    def wait(self) -> None:
        """Wait until all updates are written to disk."""
        for gate in [gate for gates in self.writing.values() for gate in gates]:
            gate.wait()
        self.writing.clear()

    @contextmanager
    def staged(self, placement: Placement, data: Opened, *, read: bool, write: bool) -> Iterator[Opened]:
        """A layer's data, with the part on disk in memory: read unless it is new, and written back if `write`."""
        if placement.file is None:
            yield data
            return
        self.wait()
        self.let_go()
        nbytes, numel = sum(placement.file.regions.values()), self._shards.trained_numel(data.layer)
        self._host.charge("temporaries", nbytes)
        try:
            tensors = [arena(field.numel(numel), field.dtype) for field in self._kept(placement)]
            if read and not placement.fresh:
                self.queue.run(region_requests(placement.file, tensors, write=False))
                self.traffic.read_nbytes += nbytes
            own_master = placement.weights.dtype == torch.float32
            master, states = (placement.weights, tensors) if own_master else (tensors[0], tensors[1:])
            yield replace(data, master=master, states=states)
            if write:
                self.queue.run(region_requests(placement.file, tensors, write=True))
                self.traffic.written_nbytes += nbytes
                placement.fresh = False
        finally:
            self._host.free("temporaries", nbytes)

    def least_seconds(self) -> dict[str, float]:
        """Least seconds of reading and of writing everything once, at the best rates measured."""
        nbytes = sum(sum(file.regions.values()) for file in self.files)
        rates = {"disk read": self.queue.read_rate, "disk write": self.queue.write_rate}
        return {name: nbytes / rate for name, rate in rates.items() if rate and nbytes}

    def figures(self, read_nbytes: int, written_nbytes: int) -> dict[str, float | str]:
        """Metrics of a step that read and wrote so many bytes; empty without a disk."""
        if not self.files:
            return {}
        return {
            "disk": "buffered" if self.buffered_because else "direct",
            "disk_read_nbytes": read_nbytes,
            "disk_written_nbytes": written_nbytes,
            "disk_read_nbytes_per_second": self.queue.read_rate,
            "disk_write_nbytes_per_second": self.queue.write_rate,
        }
