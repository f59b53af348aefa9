"""Measures a machine's rates; `Cluster.probe` runs it. `Machine` documents the figures.

Every figure is the best of a few runs of what training does: a large matrix product, copies on the engine's own streams
from registered memory, the host update kernel in huge pages. A nearly full GPU is measured with smaller buffers.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from scrimp.chunks import Copies, HostUpdate, Rates, Store, device_memory, quickest, settle
from scrimp.cluster import Machine
from scrimp.engine.setup.validate import pick_device
from scrimp.errors import RunError

PRODUCT, PRODUCT_CPU = 8192, 512  # rows of the matrices
COPIED, COPIED_CPU = 128 << 20, 16 << 20
UPDATED, UPDATED_CPU = 1 << 25, 1 << 22  # parameters: 448 and 56 MiB
SUSTAINED, SUSTAINED_CPU = 0.4, 0.05  # seconds of products
COPIES, COPIES_CPU = 8, 3  # of each kind in a row
ON_DISK, BLOCK = 64 << 20, 8 << 20
SHARED = 0.6  # share of the two-way copy rate that remains while a host update uses the same memory

Made = TypeVar("Made")


_machines: dict[torch.device, Machine] = {}
_disks: dict[Path, tuple[float, float]] = {}  # read, written


def probe(device: str | torch.device | None = None, disk: str | Path | None = None) -> Machine:
    """Measure the machine, once per process for each device and each disk."""
    where = pick_device(device)
    machine = _machines[where] if where in _machines else _machines.setdefault(where, _measured(where))
    if disk is None:
        return machine
    folder = Path(disk).resolve()
    read, written = _disks[folder] if folder in _disks else _disks.setdefault(folder, _disk(folder))
    return replace(machine, disk_read=read, disk_write=written)


def _measured(device: torch.device) -> Machine:
    cuda = device.type == "cuda"
    copies = _that_fits(lambda nbytes: Copies(device, nbytes), COPIED if cuda else COPIED_CPU)
    update = HostUpdate(UPDATED if cuda else UPDATED_CPU)
    copies.rates(up=1, down=1)
    many = COPIES if cuda else COPIES_CPU
    both = [copies.rates(up=many, down=many) for _ in range(2)]
    update.run()  # the first touches its memory
    alone = quickest(update.run, None)
    overlapped = min((_overlapped_copies if cuda else _overlapped_copies_on_host)(update, copies, alone) for _ in range(2))
    up, down = (max(copies.rates(up=many)[0] for _ in range(2)), max(copies.rates(down=many)[1] for _ in range(2)))
    del copies
    machine = Machine(
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        threads=torch.get_num_threads(),
        flops=_that_fits(lambda rows: _flops(device, rows), PRODUCT if cuda else PRODUCT_CPU),
        up=up,
        down=down,
        up_both=max(rates[0] for rates in both),
        down_both=max(rates[1] for rates in both),
        host_update=update.nbytes / alone,
        host_update_copying=update.nbytes / overlapped,
        device_memory=_that_fits(lambda nbytes: device_memory(device, nbytes), COPIED if cuda else COPIED_CPU),
    )
    if cuda:
        torch.cuda.empty_cache()
    return machine


def probe_at_rest(store: Store) -> Machine:
    """Measure between two steps of an engine, outside its meter: the device buffers are not the model's."""
    if store.device not in _machines:
        store.wait()
        store.before_change()
        probe(store.device)
        if store.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(store.device)
    return probe(store.device)


def overlapped_updates(rates: Rates, store: Store) -> Rates:
    """Rates with the measured slow-down of copies and host updates that overlap."""
    machine = probe_at_rest(store)
    shared = SHARED * min(machine.up_both, machine.down_both)
    return replace(rates, shared=shared, price=max(0.0, machine.host_update - machine.host_update_copying) / shared)


def _that_fits(make: Callable[[int], Made], size: int) -> Made:
    """Halve the size until the allocation fits."""
    while True:
        try:
            return make(size)
        except torch.OutOfMemoryError:
            if size < 1024:
                raise
        size //= 2
        torch.cuda.empty_cache()


def _flops(device: torch.device, rows: int) -> float:
    """Matrix-product rate, sustained for a while, since a device slows down under load."""
    random = torch.Generator(device).manual_seed(0)  # its own generator, so that the run's random state is untouched
    one, other, out = (torch.empty(rows, rows, device=device, dtype=torch.bfloat16) for _ in range(3))
    one.normal_(generator=random)
    other.normal_(generator=random)

    def several(times: int) -> float:
        settle(device)
        start = time.perf_counter()
        for _ in range(times):
            torch.mm(one, other, out=out)
        settle(device)
        return time.perf_counter() - start

    several(2)
    sustained = SUSTAINED if device.type == "cuda" else SUSTAINED_CPU
    times = max(2, int(sustained / several(2) * 2))
    return 2 * rows**3 * times / several(times)


def _overlapped_copies(update: HostUpdate, copies: Copies, alone: float) -> float:
    """Seconds of an update while copies run both ways for its whole duration."""
    rate = min(copies.rates(up=2, down=2))
    many = int(2 * alone * rate / copies.nbytes) + 2
    while True:
        ends = copies.start(many)
        start = time.perf_counter()
        update.run()
        seconds = time.perf_counter() - start
        running = not any(end.query() for end in ends)  # type: ignore[no-untyped-call]
        copies.copy_streams.settle()
        if running:
            return seconds
        many *= 2


def _overlapped_copies_on_host(update: HostUpdate, copies: Copies, alone: float) -> float:
    """The same without a GPU, where threads do the copies."""
    stop = threading.Event()

    def on_and_on(direction: int) -> None:
        while not stop.is_set():
            copies.once(direction)

    threads = [threading.Thread(target=on_and_on, args=(direction,)) for direction in (0, 1)]
    for thread in threads:
        thread.start()
    try:
        return quickest(update.run, None, times=1)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _disk(folder: Path) -> tuple[float, float]:
    """Bytes per second read and written, with a temporary file. Writes end with fsync, and the file's cached pages are dropped
    before reading, as far as the system obeys."""
    data = memoryview(os.urandom(BLOCK))
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="scrimp-probe-", buffering=0) as file:
            start = time.perf_counter()
            for _ in range(ON_DISK // BLOCK):
                file.write(data)
            os.fsync(file.fileno())
            written = time.perf_counter() - start
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            start = time.perf_counter()
            while file.read(BLOCK):
                pass
            return ON_DISK / (time.perf_counter() - start), ON_DISK / written
    except OSError as error:
        raise RunError(f"the disk of {folder} cannot be measured: {error.strerror}") from error
