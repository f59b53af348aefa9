"""How fast this machine copies and updates: measured once, in a few milliseconds, when a choice depends on it."""

from __future__ import annotations

import time
from functools import cache

import torch

from scrimp.chunks._classes import Rates

COPIED = 32 << 20
HOST_SHARE_OF_COPY = 0.7  # an update reaches about this share of what a plain copy moves


@cache
def measure(device: torch.device) -> Rates:
    """Bytes per second. An update's rate is taken from a copy's, reading and writing."""
    host = torch.empty(COPIED, dtype=torch.uint8)
    other = torch.empty(COPIED, dtype=torch.uint8)
    host_rate = 2 * COPIED / _seconds(lambda: other.copy_(host), device) * HOST_SHARE_OF_COPY
    if device.type != "cuda":
        return Rates(up=host_rate / 2, down=host_rate / 2, host=host_rate, device=host_rate)
    pinned = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    again = torch.empty(COPIED, dtype=torch.uint8, device=device)
    return Rates(
        up=COPIED / _seconds(lambda: there.copy_(pinned, non_blocking=True), device),
        down=COPIED / _seconds(lambda: pinned.copy_(there, non_blocking=True), device),
        host=host_rate,
        device=2 * COPIED / _seconds(lambda: again.copy_(there), device) * HOST_SHARE_OF_COPY,
    )


def _seconds(copy: object, device: torch.device) -> float:
    assert callable(copy)
    best = float("inf")
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
