"""Measures what a CUDA device needs beside live storages; `Cluster.probe(reserve=True)` runs it.

A child process measures, because a context and the kernels that a process has loaded stay. This process reads how much of the
device is used before the child starts: what the child adds is its own, and other processes are left out as long as they keep
still. The child runs a first call of each family of kernels, forward and backward, and reads after each of them

    outside      used on the device by the driver's count, minus what the allocator has reserved: context and loaded kernels
    kept         allocated after all tensors of the call are freed: the workspace of cuBLAS
    workspace    the allocator's peak during the call, minus the tensors of the call

Peaks count what kernels request from torch's allocator; cuDNN and attention do that, and cuBLAS under torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from scrimp._warnings import warn
from scrimp.cluster import Cluster, Reserve
from scrimp.engine.setup.validate import pick_device

SECONDS = 300.0
ROWS = 4096  # of matrix products
HEADS, TOKENS, HEAD_DIM = 16, 4096, 128
BATCH, CHANNELS, PIXELS = 32, 64, 56
ODD = (1, 511, 512, 513, 100_003, (1 << 20) - 1, (1 << 20) + 1, (10 << 20) + 1)  # bytes
ESTIMATES = Cluster.preset("1xH200").expected_reserve  # for what one GPU does not show


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of kernels. `make` gives the inputs; `run` uses them and returns every tensor that it makes for its caller."""

    name: str
    make: Callable[[torch.device], tuple[Tensor, ...]]
    run: Callable[..., tuple[Tensor, ...]]


def probe_reserve(device: str | torch.device | None = None) -> Reserve | None:
    """Of the device that an engine would use; None on a CPU, which needs nothing beside a plan."""
    where = pick_device(device)
    if where.type != "cuda":
        return None
    return reserve_of(torch.cuda.get_device_name(where), torch.__version__, _observed(where))


def reserve_of(name: str, version: str, observed: dict[str, int]) -> Reserve:
    """The figures that follow from single measurements. Context: with all kernels loaded. Workspace: what stays allocated, and
    the largest that a call takes besides."""
    takes = [nbytes for what, nbytes in observed.items() if what.startswith("workspace of ")]
    return replace(
        ESTIMATES, device=name, torch=version, context_nbytes=observed["outside, all kernels loaded"],
        workspace_nbytes=observed["kept"] + max(takes), block_nbytes=observed["block"], measured=("context", "workspace"),
        observed=tuple(observed.items()),
    )  # fmt: skip


def _observed(device: torch.device) -> dict[str, int]:
    """In a child process. If none can run on this device, as in exclusive mode, in this one: the context then counts what other
    processes use."""
    before = _used(device)
    command = [sys.executable, "-m", __name__, str(device), str(before)]
    path = os.pathsep.join(filter(None, sys.path))
    try:
        ended = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=SECONDS, check=True
        )
        found: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        told = getattr(error, "stderr", None) or str(error)
        warn(
            f"{device}: no child process could measure the context, so that its figure has the bytes of all processes on the "
            f"device: {str(told).strip()[-500:]}",
            RuntimeWarning,
        )
        return measure(device, 0)
    return {**found, "change of other processes": _used(device) - before}


def _used(device: torch.device) -> int:
    """Of the device, by all processes, as the driver counts."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def measure(device: torch.device, before: int) -> dict[str, int]:
    """`before`: bytes that others use on the device."""

    def outside() -> int:
        return _used(device) - torch.cuda.memory_reserved(device) - before

    found = {"device memory": torch.cuda.mem_get_info(device)[1]}
    torch.empty(1, device=device).fill_(0)
    found["outside, first kernel"] = outside()
    torch.cuda.empty_cache()
    found.update(_blocks(device))
    kept = torch.cuda.memory_allocated(device)
    for family in families():
        found[f"workspace of {family.name}"] = _workspace(family, device)
        found[f"outside, after {family.name}"] = outside()
    found["kept"] = torch.cuda.memory_allocated(device) - kept
    torch.cuda.empty_cache()
    found["outside, all kernels loaded"] = outside()
    return found


def _workspace(family: Family, device: torch.device) -> int:
    """The first call and one more: the allocator's peak besides the call's tensors and what stayed allocated before it."""
    inputs = family.make(device)
    peak = 0
    for _ in range(2):
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        made = family.run(*inputs)
        torch.cuda.synchronize(device)
        mine = torch.cuda.max_memory_allocated(device) - held
        stayed = torch.cuda.memory_allocated(device) - held - _nbytes(made)  # counted as kept
        peak = max(peak, mine - _nbytes(made) - max(stayed, 0))
        del made
    return peak


def _nbytes(tensors: tuple[Tensor, ...]) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(-(-size // 512) * 512 for size in storages.values())


def _blocks(device: torch.device) -> dict[str, int]:
    """The size of a block, the largest excess over a multiple of it, and the segments of small and large tensors."""
    found = {}
    excess = []
    for nbytes in ODD:
        torch.cuda.empty_cache()
        held, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        each = torch.empty(nbytes, dtype=torch.uint8, device=device)
        took = torch.cuda.memory_allocated(device) - held
        if nbytes == 1:
            found["block"] = took
        excess.append(took - -(-nbytes // found["block"]) * found["block"])
        found[f"segment of {nbytes:,} B"] = torch.cuda.memory_reserved(device) - reserved
        del each
    torch.cuda.empty_cache()
    return {**found, "most above whole blocks": max(excess)}


def families() -> list[Family]:
    """Calls of each, of the sizes of a layer of a large model: a forward alone, and with its backward, which is autograd's."""
    found = []
    square, heads, bias = (ROWS, ROWS), (1, HEADS, TOKENS, HEAD_DIM), (ROWS,)
    images, kernel = (BATCH, CHANNELS, PIXELS, PIXELS), (CHANNELS, CHANNELS, 3, 3)
    calls: list[tuple[str, Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = [
        ("a matmul", torch.mm, (square, square)),
        ("a linear layer", functional.linear, (square, square, bias)),
        ("attention", partial(functional.scaled_dot_product_attention, is_causal=True), (heads, heads, heads)),
        ("a convolution", partial(functional.conv2d, padding=1), (images, kernel)),
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for name, call, shapes in calls:
            full = f"{name}, {str(dtype).removeprefix('torch.')}"
            make = partial(_made, dtype, shapes)
            found.append(Family(name=full, make=make, run=partial(_forward, call)))
            found.append(Family(name=f"{full}, and its backward", make=make, run=partial(_both_ways, call)))
    return found


def _made(dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.ones(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)


def _forward(call: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return (call(*inputs),)


def _both_ways(call: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    out = call(*inputs)
    gradient = torch.ones_like(out)
    return (out, gradient, *torch.autograd.grad(out, inputs, gradient))


if __name__ == "__main__":
    where = torch.device(sys.argv[1])
    torch.cuda.set_device(where)
    print(json.dumps(measure(where, int(sys.argv[2]))))
