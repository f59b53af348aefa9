"""What the tests of update kernels share: optimizers of every kind, and Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from scrimp.chunks.kernels.device_update import Fused, Kind, device_kernel, why_no_device_kernel
from scrimp.chunks.tables.optimizers import SGD, AdamW, Optimizer

OPTIMIZERS: tuple[Optimizer, ...] = (
    AdamW(lr=1e-3),
    AdamW(lr=3e-2, betas=(0.4, 0.95), eps=1e-4, weight_decay=0.3),  # another branch of lerp
    AdamW(lr=0.1, betas=(0.0, 0.0), weight_decay=0.0),
    SGD(lr=0.1),
    SGD(lr=0.01, weight_decay=0.1),
    SGD(lr=0.01, momentum=0.9, weight_decay=0.1),
    SGD(lr=0.01, momentum=0.9, dampening=0.3),
    SGD(lr=0.3, momentum=0.7, nesterov=True, weight_decay=0.01),
)
TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and TRITON


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whoever waits for the GPU inside gets an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run_interpreted(file: str) -> None:
    """The tests of a file whose names have "interpreted" in them, in a process of its own: the switch is read when Triton is
    imported."""
    if torch.cuda.is_available():
        pytest.skip("the tests on the GPU say more")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", file, "-k", "interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=Path(file).parents[1], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def on_the_gpu(wanted: frozenset[Kind]) -> Fused:
    """The device's kernel, which must be there where Triton is."""
    device = torch.device("cuda", torch.cuda.current_device())
    found = device_kernel(device, wanted)
    if found is None and not TRITON:
        pytest.skip("no Triton")
    assert found is not None, why_no_device_kernel(device, wanted)
    return found
