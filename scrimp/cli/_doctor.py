"""`scrimp doctor`: reports what this machine has.

A probe is a function that returns a line of text and the same as data. `examine` runs each of them separately: an exception
becomes a row of the report, and warnings are shown next to it, so that a broken driver is reported and does not crash the
command.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import scrimp
from scrimp.cli.render.picture import nbytes_text
from scrimp.cli.render.table import print_table

if TYPE_CHECKING:
    from rich.console import Console

FORMAT, VERSION = "scrimp.doctor", 1
PACKAGES = ("numpy", "typer", "rich", "hypothesis", "jax", "triton", "transformers", "safetensors")
NO_LIMIT = 1 << 60  # cgroup v1 without a limit reports a number near 2 ** 63

Finding = tuple[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    text: str
    data: dict[str, Any]
    failed: bool = False


def examine(*, deep: bool = False) -> list[Row]:
    """One row per probe; an exception becomes a row too."""
    return [_try(name, probe) for name, probe in {**PROBES, **(DEEP_PROBES if deep else {})}.items()]


def _try(name: str, probe: Callable[[], Finding]) -> Row:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            text, data = probe()
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Row(
                name=name, text=f"failed: {shorten(reason, 400, placeholder=' ...')}", data={"failed": reason}, failed=True
            )
    notes = [shorten(str(warning.message), 200, placeholder=" ...") for warning in caught]
    if notes:
        text, data = "; ".join([text, *(f"warned: {note}" for note in notes)]), {**data, "warnings": notes}
    return Row(name=name, text=text, data=data)


def show(console: Console, rows: list[Row]) -> None:
    print_table(console, ("", ""), [(row.name, row.text) for row in rows], pieces="")


def to_json(rows: list[Row]) -> str:
    return json.dumps({"format": FORMAT, "version": VERSION, "probes": {row.name: row.data for row in rows}})


def python() -> Finding:
    version = platform.python_version()
    return f"{version} ({platform.python_implementation()})", {"version": version, "executable": sys.executable}


def scrimp_version() -> Finding:
    return scrimp.__version__, {"version": scrimp.__version__}


def system() -> Finding:
    text = platform.platform()
    return text, {"platform": text, "machine": platform.machine()}


def cores() -> Finding:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    text = f"{total} cores" + (f", {usable} of them for this process" if usable < total else "")
    return text, {"cores": total, "usable": usable}


def memory() -> Finding:
    data: dict[str, Any] = {"total_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    text = f"{nbytes_text(data['total_nbytes'])} in all"
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        data["available_nbytes"] = int(fields["MemAvailable"].split()[0]) * 1024
        text += f", {nbytes_text(data['available_nbytes'])} available"
    data["cgroup_limit_nbytes"] = limit = cgroup_limit_nbytes()
    return f"{text}, " + ("no cgroup limit" if limit is None else f"cgroup limit {nbytes_text(limit)}"), data


def cgroup_limit_nbytes(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """The smallest limit of this process's control group and its ancestors; None where there is none."""
    limits = []
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(top):
                break
            file = folder / name
            text = file.read_text().strip() if file.exists() else "max"
            limits += [int(text)] if text.isdigit() and int(text) < NO_LIMIT else []
    return min(limits, default=None)


def disk() -> Finding:
    usage = shutil.disk_usage(".")
    refused = _no_direct_io()
    way = f"through the page cache: {refused}" if refused else "direct I/O"
    text = f"{nbytes_text(usage.free)} free of {nbytes_text(usage.total)} in the current directory, {way}"
    return text, {"free_nbytes": usage.free, "total_nbytes": usage.total, "direct_io": refused is None}


def _no_direct_io() -> str | None:
    """Why spill files in this folder would use the page cache; None if direct I/O works."""
    from scrimp.chunks import open_direct

    try:
        with tempfile.TemporaryFile(dir=".", buffering=0) as file:
            os.close(open_direct(file.fileno()))
    except OSError as error:
        return error.strerror
    return None


def torch_build() -> Finding:
    import torch

    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"
    return f"{torch.__version__}, built for {build}", {"version": torch.__version__, "cuda": cuda, "hip": hip}


def kernel() -> Finding:
    from scrimp.chunks import host_kernel, why_no_host_kernel

    found = host_kernel()
    if found is None:
        return f"none, torch's kernels are used instead: {why_no_host_kernel()}", {"reason": why_no_host_kernel()}
    return found.describe(), {"instructions": found.instructions, "compiler": found.compiler}


def exchange_kernel() -> Finding:
    from scrimp.exchange import host_selection, why_no_host_selection

    found = host_selection()
    if found is None:
        return f"none, torch's kernels are used instead: {why_no_host_selection()}", {"reason": why_no_host_selection()}
    return found.describe(), {"instructions": found.instructions, "compiler": found.compiler}


def device_kernel() -> Finding:
    import torch

    from scrimp.chunks import AdamW, update_kinds, why_no_device_kernel

    if not torch.cuda.is_available():
        return "none, and no GPU that would need one", {"reason": "no GPU"}
    reason = why_no_device_kernel(torch.device("cuda", torch.cuda.current_device()), update_kinds([AdamW()], [torch.bfloat16]))
    if reason is not None:
        return f"none, torch's kernels are used instead: {reason}", {"reason": reason}
    version = importlib.metadata.version("triton")
    return f"Triton {version}", {"triton": version}


def gpus() -> Finding:
    import torch

    if not torch.cuda.is_available():
        tool = shutil.which("nvidia-smi")
        hint = "; nvidia-smi is here, so check the driver and the build of torch" if tool else ""
        return f"none that torch can use{hint}", {"gpus": []}
    found, texts = [], []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        one: dict[str, Any] = {"name": card.name, "total_nbytes": card.total_memory}
        try:  # a card in exclusive use by another process only has a name
            one["free_nbytes"] = torch.cuda.mem_get_info(index)[0]
            free = f"{nbytes_text(one['free_nbytes'])} free"
        except RuntimeError as error:
            one["failed"] = str(error)
            free = f"cannot be used: {shorten(str(error), 100, placeholder=' ...')}"
        found.append(one)
        texts.append(f"{index}: {card.name}, {nbytes_text(card.total_memory)}, {free}")
    return "\n".join(texts), {"gpus": found}


def backends() -> Finding:
    import torch.distributed as dist

    if not dist.is_available():
        return "torch is built without torch.distributed", {"available": []}
    have = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    text = ", ".join(name if there else f"no {name}" for name, there in have.items())
    return text, {"available": [name for name, there in have.items() if there]}


def packages() -> Finding:
    """Checks installed metadata, without importing: some packages take seconds, and a broken one can end the process."""
    have: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            have[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            have[name] = None
    here = ", ".join(f"{name} {version}" for name, version in have.items() if version)
    missing = ", ".join(name for name, version in have.items() if not version)
    return here + (f"; not installed: {missing}" if missing else ""), dict(have)


def loopback() -> Finding:
    from scrimp.ext.ranks import RankPool

    with RankPool(2) as ranks:
        right = ranks.run(exchange_a_little)
    if not all(right):
        raise RuntimeError(f"two processes exchanged an array and got wrong values: {right}")
    return "two processes exchanged an array", {"works": True}


def exchange_a_little() -> bool:
    """Runs on each of two ranks: a small array from rows to columns."""
    import torch
    import torch.distributed as dist

    from scrimp.layout import Mesh
    from scrimp.move import synthesize

    full, rank = torch.arange(16.0).view(4, 4), dist.get_rank()
    program = synthesize((4, 4), Mesh({"x": 2}), "[x,-]", "[-,x]")
    return torch.equal(program.run(full[2 * rank : 2 * rank + 2]), full[:, 2 * rank : 2 * rank + 2])


PROBES: dict[str, Callable[[], Finding]] = {
    "python": python,
    "scrimp": scrimp_version,
    "platform": system,
    "cpu": cores,
    "memory": memory,
    "disk": disk,
    "torch": torch_build,
    "native kernel": kernel,
    "exchange kernel": exchange_kernel,
    "device kernel": device_kernel,
    "gpu": gpus,
    "distributed": backends,
    "packages": packages,
}
DEEP_PROBES: dict[str, Callable[[], Finding]] = {"gloo": loopback}
