"""What a rank's spill files share: threads, the host memory that layers pass through, and what is still to be written.

An update takes tiles of fixed size through a few stages, however large a layer is. Whoever wants a layer as a whole (taking
the model over, checkpoints, undoing a step) gets a stage for all of it, after all that was on its way has been written and
the update's stages have been let go: the host never holds both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from scrimp.chunks._arena import arena
from scrimp.chunks._home import Home, Opened
from scrimp.chunks._lanes import Traffic
from scrimp.chunks._spill import BLOCK, SpillFile
from scrimp.chunks._spill_queue import SpillQueue, requests
from scrimp.chunks._worker import Gate
from scrimp.ledger import Ledger

TILE = 4 << 20  # the most elements of a layer that are updated at a time; a multiple of the spill file's blocks
STAGES = 3  # one is read, one updated, one written


def tile_numel(largest_numel: int) -> int:
    """So that all stages together take no more than the largest layer does as a whole, if it has a block for each."""
    block = BLOCK // 4
    return max(block, min(TILE, largest_numel // STAGES // block * block))


class Spilling:
    """`homes` are those of all layers, on disk or not. `writing` has a gate for each update that is on its way to the disk.
    All of it is used by the thread that trains; `free` by those that update, under their lock."""

    def __init__(self, homes: list[Home], host: Ledger, traffic: Traffic) -> None:
        self.queue = SpillQueue()
        self.traffic = traffic
        self.writing: list[Gate] = []
        self.free: list[list[torch.Tensor]] = []  # stages
        self.stages = STAGES
        self._homes = homes
        self._host = host
        self._made = 0
        regions = [[*file.regions.values()] for file in self.files]
        self._largest = max((nbytes // 4 for row in regions for nbytes in row), default=0)
        self._tensors = max(map(len, regions), default=0)
        self._whole_nbytes = max(map(sum, regions), default=0)
        self.tile = tile_numel(self._largest)
        weakref.finalize(self, self.queue.close)

    @property
    def files(self) -> list[SpillFile]:
        return [home.file for home in self._homes if home.file is not None]

    @property
    def stage_nbytes(self) -> int:
        return 4 * min(self.tile, self._largest) * self._tensors

    @property
    def need_nbytes(self) -> int:
        """Host memory that layers pass through: in tiles, or one of them as a whole."""
        return max(self.stage_nbytes * self.stages, self._whole_nbytes)

    @property
    def buffered_because(self) -> str | None:
        """Why the page cache takes part, if it does."""
        return next((file.buffered_because for file in self.files if file.buffered_because), None)

    def within(self, room_nbytes: int) -> None:
        """As many stages as there is room for."""
        self.stages = max(1, min(STAGES, room_nbytes // max(1, self.stage_nbytes)))

    def tiles(self, numel: int) -> list[tuple[int, int]]:
        """Where a layer's tiles start and stop."""
        return [(start, min(start + self.tile, numel)) for start in range(0, numel, self.tile)]

    def make(self) -> list[torch.Tensor]:
        """The stages of an update, if they are not there; the new tensors."""
        if self._made:
            return []
        self._made = self.stage_nbytes * self.stages
        self._host.charge("temporaries", self._made)
        numel = min(self.tile, self._largest)
        self.free = [[arena(numel, torch.float32) for _ in range(self._tensors)] for _ in range(self.stages)]
        return [tensor for stage in self.free for tensor in stage]

    def let_go(self) -> None:
        """Of the stages, which nobody uses."""
        self.free.clear()
        self._host.free("temporaries", self._made)
        self._made = 0

    def wait(self) -> None:
        """Until all that was updated is on the disk."""
        for gate in self.writing:
            gate.wait()
        self.writing.clear()

    @contextmanager
    def staged(self, home: Home, data: Opened, *, read: bool, write: bool) -> Iterator[Opened]:
        """A layer's data, with what is on disk in memory: read unless it is new, and written afterwards if so wished."""
        if home.file is None:
            yield data
            return
        self.wait()
        self.let_go()
        sizes = [nbytes // 4 for nbytes in home.file.regions.values()]
        nbytes = 4 * sum(sizes)
        self._host.charge("temporaries", nbytes)
        try:
            tensors = [arena(numel, torch.float32) for numel in sizes]
            if read and not home.fresh:
                self.queue.run(requests(home.file, tensors, write=False))
                self.traffic.read_nbytes += nbytes
            own_master = home.weights.dtype == torch.float32
            master, states = (home.weights, tensors) if own_master else (tensors[0], tensors[1:])
            yield replace(data, master=master, states=states)
            if write:
                self.queue.run(requests(home.file, tensors, write=True))
                self.traffic.written_nbytes += nbytes
                home.fresh = False
        finally:
            self._host.free("temporaries", nbytes)

    def least_seconds(self) -> dict[str, float]:
        """Of a step that reads and writes all of it once, at the best rates seen."""
        nbytes = sum(sum(file.regions.values()) for file in self.files)
        rates = {"disk read": self.queue.read_rate, "disk write": self.queue.write_rate}
        return {name: nbytes / rate for name, rate in rates.items() if rate and nbytes}

    def figures(self, read_nbytes: int, written_nbytes: int) -> dict[str, float | str]:
        """For the metrics of a step in which so much was read and written; nothing without a disk."""
        if not self.files:
            return {}
        return {
            "disk": "buffered" if self.buffered_because else "direct",
            "disk_read_nbytes": read_nbytes,
            "disk_written_nbytes": written_nbytes,
            "disk_read_nbytes_per_second": self.queue.read_rate,
            "disk_write_nbytes_per_second": self.queue.write_rate,
        }
