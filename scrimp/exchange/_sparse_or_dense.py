"""Decides whether a parameter is sent whole or sparse: whichever takes less time, by measured rates.

    whole      2 (P - 1) / P * n * 2 bytes over the network, reduced in a ring
    entries    (P - 1) * density * n * (2 + itemsize) bytes, gathered, and a selection from n elements

Selection overlaps with the network as little as compute does: on a busy host everything adds up. With P * density near 1 or more,
the entries of all ranks are as many as all elements, and whole is better whatever the network.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from scrimp.chunks import Wire
from scrimp.exchange._error_feedback import ErrorFeedback, Momentum
from scrimp.exchange._residual import residual
from scrimp.exchange._row_topk import COLUMNS, row_topk

PROBED = 1 << 18  # bytes of all ranks together, in the message that measures the network
TIMES = 3


@dataclass(frozen=True, kw_only=True)
class Pace:
    """`network`: bytes per second that a rank sends; `selecting`: elements per second that it selects from."""

    network: float
    selecting: float


def sparse_pays(numel: int, world: int, density: float, itemsize: int, pace: Pace) -> bool:
    if world == 1:
        return True
    whole = 2 * (world - 1) / world * numel * 2 / pace.network
    few = (world - 1) * density * numel * (2 + itemsize) / pace.network + numel / pace.selecting
    return few < whole


def measure_pace(wire: Wire, device: torch.device, density: float) -> Pace:
    """Measures all ranks at once, as in a step, and takes the slowest, so that all choose alike. It takes a fraction of a second
    on a slow network."""
    if wire.world == 1:
        return Pace(network=float("inf"), selecting=float("inf"))
    row = torch.zeros(PROBED // wire.world, dtype=torch.uint8)
    rows = torch.empty(wire.world * row.numel(), dtype=torch.uint8)
    seconds = []
    for _ in range(TIMES):
        wire.meet()
        start = time.perf_counter()
        wire.gather(row, rows)
        seconds.append(time.perf_counter() - start)
    network = row.numel() * (wire.world - 1) / min(seconds)
    mine = torch.tensor([network, _selecting(device, density)], dtype=torch.float64)
    network, selecting = wire.every(mine).amin(0).tolist()
    return Pace(network=network, selecting=selecting)


def _selecting(device: torch.device, density: float) -> float:
    numel = 4 * COLUMNS
    kept = ErrorFeedback(
        rule=Momentum(momentum=0.9), states=[torch.zeros(numel, device=device)], rest=residual("fp32", numel, device), numel=numel
    )
    gradient, how, seconds = torch.randn(numel, device=device), row_topk(numel, density), []
    for _ in range(TIMES):
        start = time.perf_counter()
        kept.add(gradient, 1.0)
        kept.send(how, torch.bfloat16, 1.0)[1].cpu()
        seconds.append(time.perf_counter() - start)
    return numel / min(seconds)
