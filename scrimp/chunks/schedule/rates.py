"""Measures how fast this machine copies and updates, with the same buffers, streams and kernels as training.

`measure_rates` is a quick measurement of some tens of milliseconds when an engine is built, because placements depend on it. The
engine then learns the host's rate from its own updates. `Cluster.probe` measures longer, by the same means
(`engine/schedule/probe.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from scrimp.chunks.schedule.step_cost import Rates
from scrimp.chunks.store.placement import Piece
from scrimp.chunks.tables.optimizers import AdamW
from scrimp.chunks.transfer.copy_streams import CopyStreams
from scrimp.chunks.transfer.host_arena import arena
from scrimp.chunks.update.update import Updater

QUICK_NUMEL, QUICK_NUMEL_CPU = 1 << 22, 1 << 20  # parameters: 56 MiB, and 14 without a GPU, where one rate scales all others
QUICK_NBYTES = 64 << 20  # of a copy
UPDATE_SHARE_OF_COPY = 0.7  # an update on the device reaches about this share of what a plain copy moves


@cache
def measure_rates(device: torch.device) -> Rates:
    """Bytes per second. Without a GPU the link and the device are this host's memory, and share its rate."""
    update = HostUpdate(QUICK_NUMEL if device.type == "cuda" else QUICK_NUMEL_CPU)
    host = update.nbytes / quickest(update.run, None)
    if device.type != "cuda":
        return Rates(up=host / 2, down=host / 2, host=host, device=host)
    copies = Copies(device, QUICK_NBYTES)
    up, down = copies.rates(up=3)[0], copies.rates(down=3)[1]
    return Rates(up=up, down=down, host=host, device=device_memory(device, QUICK_NBYTES) * UPDATE_SHARE_OF_COPY)


def quickest(run: Callable[[], object], device: torch.device | None, times: int = 4) -> float:
    """Seconds of the fastest of a few runs; `device`: synchronised before and after each."""
    seconds = []
    for _ in range(times):
        settle(device)
        start = time.perf_counter()
        run()
        settle(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def settle(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)


class HostUpdate:
    """The update of one parameter on the host tier, in arenas as a layer has them, with the kernel that training uses."""

    def __init__(self, numel: int) -> None:
        self.nbytes = int(AdamW().update_nbytes * numel)
        weight = arena(numel, torch.bfloat16).fill_(0.1)
        master, m, v = (arena(numel, torch.float32).fill_(0.1) for _ in range(3))
        self._piece = Piece(inside=slice(0, numel), weight=weight, gradient=weight, master=master, states=[m, v])
        self._updater = Updater(torch.device("cpu"), numel)
        self._count = 0

    def run(self) -> None:
        self._count += 1
        self._updater.apply(AdamW(), 0, self._count, self._piece, None, own_master=False)


class Copies:
    """Buffers on both sides of the link, to copy one way or both at once."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.nbytes = nbytes
        self.copy_streams = CopyStreams(device)
        pinned = self.copy_streams.overlapped
        self._there = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._here = [arena(nbytes, torch.uint8, pinned=pinned).fill_(1) for _ in range(2)]

    def rates(self, *, up: int = 0, down: int = 0) -> tuple[float, float]:
        """Bytes per second each way while so many copies run up and down at once; 0 for a direction without copies."""
        seconds = self._on_device(up, down) if self.copy_streams.overlapped else self._on_host(up, down)
        return up * self.nbytes / seconds[0] if up else 0.0, down * self.nbytes / seconds[1] if down else 0.0

    def start(self, copies: int) -> list[torch.cuda.Event]:
        """On CUDA: start so many copies each way. The events mark the end of the last ones."""
        ends = []
        for _ in range(copies):
            ends = [self.copy_streams.up(self._there[0], self._here[0]), self.copy_streams.down(self._here[1], self._there[1])]
        return [end for end in ends if end is not None]

    def once(self, direction: int) -> None:
        """Without CUDA, where copies are synchronous: one copy up (0) or down (1)."""
        pair = (self._there[0], self._here[0]) if direction == 0 else (self._here[1], self._there[1])
        pair[0].copy_(pair[1])

    def _on_device(self, up: int, down: int) -> tuple[float, float]:
        stream = torch.cuda.current_stream(self.copy_streams.device)
        torch.cuda.synchronize(self.copy_streams.device)
        start, up_end, down_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        start.record(stream)
        for k in range(max(up, down)):
            if k < up:
                self.copy_streams.up(self._there[0], self._here[0])
            if k < down:
                self.copy_streams.down(self._here[1], self._there[1])
        up_end.record(self.copy_streams.upward)
        down_end.record(self.copy_streams.downward)
        torch.cuda.synchronize(self.copy_streams.device)
        return start.elapsed_time(up_end) / 1e3, start.elapsed_time(down_end) / 1e3

    def _on_host(self, up: int, down: int) -> tuple[float, float]:
        def several(direction: int, copies: int) -> float:
            start = time.perf_counter()
            for _ in range(copies):
                self.once(direction)
            return time.perf_counter() - start

        with ThreadPoolExecutor(2) as threads:
            one, other = threads.submit(several, 0, up), threads.submit(several, 1, down)
            return one.result(), other.result()


def device_memory(device: torch.device, nbytes: int) -> float:
    """Bytes per second read and written by a copy inside the device's memory."""
    one, other = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * nbytes / quickest(lambda: other.copy_(one), device)
