"""Reads the machine: free memory and disks, a disk's write speed, a port, torch's version."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from scrimp.engine import available_host_nbytes

SHM = Path("/dev/shm")
TRIAL_NBYTES = 32 << 20
PORT = 29500  # torchrun's own


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Free bytes; None where there is no such place. `tier_rate`: bytes per second, written and synced."""

    torch: str
    host_nbytes: int
    shm_nbytes: int | None
    run_nbytes: int
    tier_nbytes: int | None = None
    tier_rate: float | None = None
    same_disk: bool = False
    port: int = PORT
    port_free: bool = True


def machine_of(run: Path, disk: Path | None, *, measure: bool) -> Machine:
    """`run`: the run folder, `disk`: that of the disk tier. `measure`: also write a file to the disk tier."""
    port = int(os.environ.get("MASTER_PORT", PORT))
    there = None if disk is None else existing(disk)
    return Machine(
        torch=torch.__version__,
        host_nbytes=available_host_nbytes(),
        shm_nbytes=shutil.disk_usage(SHM).free if SHM.is_dir() else None,
        run_nbytes=shutil.disk_usage(existing(run)).free,
        tier_nbytes=None if there is None else shutil.disk_usage(there).free,
        tier_rate=write_rate(there) if there is not None and measure else None,
        same_disk=there is not None and there.stat().st_dev == existing(run).stat().st_dev,
        port=port,
        port_free=port_is_free(port),
    )


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())


def write_rate(folder: Path) -> float | None:
    """Bytes per second of a short file; None where nothing can be written."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".scrimp-trial-") as file:
            began = time.perf_counter()
            for _ in range(TRIAL_NBYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return TRIAL_NBYTES / (time.perf_counter() - began)
    except OSError:
        return None


def port_is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
