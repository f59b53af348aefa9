"""Resolves `Memory` into a budget in bytes, and records where each number came from."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from scrimp.errors import RunError
from scrimp.ledger import format_nbytes, parse_nbytes

DEVICE_SHARE, HOST_SHARE, NO_GPU_SHARE = 0.9, 0.8, 0.25
PLAN_SHARE = 0.95


@dataclass(frozen=True, kw_only=True)
class Memory:
    """`device` is per rank, `host` per node. "auto": 90 % of the free CUDA memory, or without a GPU 25 % of the
    available RAM; 80 % of what the host has available under its cgroup limit. `disk` is a folder for masters and
    optimizer states that the host has no room for.

    >>> import scrimp
    >>> scrimp.Memory(device="24GiB", host="100GiB").device
    '24GiB'
    """

    device: int | str = "auto"
    host: int | str = "auto"
    disk: str | Path | None = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Resolved sizes, and where each came from. Schedules are made for `plan_nbytes`: on CUDA a little less than the budget,
    because the allocator fragments."""

    device_nbytes: int
    device_origin: str
    plan_nbytes: int
    host_nbytes: int
    host_origin: str
    disk: Path | None
    disk_free_nbytes: int | None = None  # in that folder

    def device_for(self, plan_nbytes: int) -> int:
        """The least device budget whose `plan_nbytes` is at least this."""
        share = 1.0 if self.plan_nbytes == self.device_nbytes else PLAN_SHARE
        nbytes = int(plan_nbytes / share)
        while int(nbytes * share) < plan_nbytes:
            nbytes += 1
        return nbytes

    def __str__(self) -> str:
        return (
            f"device {format_nbytes(self.device_nbytes)} ({self.device_origin}), "
            f"host {format_nbytes(self.host_nbytes)} ({self.host_origin})" + (f", disk {self.disk}" if self.disk else "")
        )


def memory_of(given: Memory | int | str | None) -> Memory:
    """A `Memory`; a plain size is that of the device."""
    if given is None:
        return Memory()
    if isinstance(given, (int, str)) and not isinstance(given, bool):
        return Memory(device=given)
    if not isinstance(given, Memory):
        raise RunError(f"memory={given!r}: give scrimp.Memory(device=..., host=..., disk=...), or a size such as '24GiB'")
    return given


def resolve(memory: Memory, device: torch.device) -> Budget:
    available = available_host_nbytes()
    if memory.device != "auto":
        of_device, device_origin = parse_nbytes(memory.device), "as requested"
    elif device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        of_device, device_origin = int(free * DEVICE_SHARE), "90 % of the free CUDA memory"
    else:
        of_device, device_origin = int(available * NO_GPU_SHARE), "25 % of the available RAM, there being no GPU"
    if memory.host != "auto":
        of_host, host_origin = parse_nbytes(memory.host), "as requested"
    else:
        of_host, host_origin = int(available * HOST_SHARE), "80 % of the available RAM"
    return Budget(
        device_nbytes=of_device,
        device_origin=device_origin,
        plan_nbytes=int(of_device * PLAN_SHARE) if device.type == "cuda" else of_device,
        host_nbytes=of_host,
        host_origin=host_origin,
        disk=Path(memory.disk) if memory.disk is not None else None,
        disk_free_nbytes=_free(Path(memory.disk)) if memory.disk is not None else None,
    )


def _free(folder: Path) -> int:
    """Free bytes of the disk that a folder is on, or will be on once it exists."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free


def available_host_nbytes() -> int:
    """What may still be used: MemAvailable, or what the cgroup leaves if that is less."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    limit, used = (_cgroup(name) for name in ("memory.max", "memory.current"))
    return min(available, limit - used + _reclaimable()) if limit is not None and used is not None else available


def _reclaimable() -> int:
    """Cached files of the cgroup: counted as used, but reclaimed under pressure."""
    try:
        rows = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(rows.get("inactive_file", 0))


def _cgroup(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
