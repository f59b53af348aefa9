"""The machine that figures were taken on, in words: a figure without one means nothing.

Nothing here raises: what cannot be found is "unknown".
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

from bench.gpu.contenders_folder import FOLDER

UNKNOWN = "unknown"


def machine() -> dict[str, str]:
    """Such as {"cpu": "...", "cores": "2", "memory": "23.5 GiB", "torch": "2.13.0+cpu", "commit": "1a2b3c4, changed since"}."""
    facts: dict[str, Callable[[], str]] = {
        "cpu": _cpu,
        "gpu": _gpu,
        "cores": _cores,
        "memory": _memory,
        "available": _available,
        "os": lambda: f"{platform.system()} {platform.release().partition('-')[0]}",
        "load": _load,
        "python": platform.python_version,
        "torch": lambda: _version("torch"),
        **{name: partial(_version, name) for name in ("triton", "transformers", "deepspeed", "torchao", "jax")},
        "commit": _commit,
    }
    return {name: _or_unknown(find) for name, find in facts.items()}


def _or_unknown(find: Callable[[], str]) -> str:
    try:
        return find() or UNKNOWN
    except Exception:  # a benchmark must not fail because a machine cannot describe itself
        return UNKNOWN


def _cpu() -> str:
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string")
    return platform.processor() or platform.machine()


def _cores() -> str:
    """Those this process may use, and those there are where they are more."""
    there = os.cpu_count() or 0
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    return str(usable) if usable == there else f"{usable} of {there}"


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"


def _available() -> str:
    """What the host has left at the start."""
    from scrimp.engine import available_host_nbytes  # here, because it brings torch

    return f"{available_host_nbytes() / 2**30:.1f} GiB"


def _gpu() -> str:
    """Its name, memory and driver; without the driver's own tool, as where there is none: "none"."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    return _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def _load() -> str:
    """Load averages at the start: others on the machine slow the figures down."""
    return " ".join(f"{load:.2f}" for load in os.getloadavg())


def _version(package: str) -> str:
    found = next(iter(metadata.distributions(name=package, path=[*sys.path, str(FOLDER)])), None)
    return found.version if found is not None else "not installed"


def _commit() -> str:
    commit = _output("git", "rev-parse", "--short=12", "HEAD")
    return f"{commit}, changed since" if _output("git", "status", "--porcelain") else commit


def _output(*command: str) -> str:
    home = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def high_water_nbytes() -> int:
    """The most memory that this process ever had. Not ru_maxrss, which may begin with the parent's figure."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) * 1024
