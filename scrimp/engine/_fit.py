"""Whether model data fits, before anything is allocated: the largest layer on the device, all homes on host and disk."""

from __future__ import annotations

import torch

from scrimp.chunks._home import DEVICE, DISK, HOST, sizes
from scrimp.chunks._optim import AdamW, Optimizer
from scrimp.chunks._shards import Shards
from scrimp.chunks._store import DTYPES
from scrimp.chunks._table import ChunkTable, LayerSpace
from scrimp.engine._memory import Budget
from scrimp.errors import FitError
from scrimp.exchange._residual import residual_nbytes
from scrimp.ledger import format_nbytes


def first_places(
    table: ChunkTable, budget: Budget, *, precision: str, optimizer: Optimizer, accumulate: int, world: int, ranks_here: int,
    residual: str | None = None,
) -> list[str]:  # fmt: skip
    """Where each layer's home is at first: on the host; if that is full, with its masters and states on disk, last layers
    first; without a disk on the device, first layers first, which leaves room for one more layer at least. `residual`: what a
    sparse exchange keeps of each layer on the host."""
    dtypes = [torch.float32 if layer.wide else DTYPES[precision] for layer in table.layers]
    _fits_device(table, budget, dtypes)
    shards = Shards(table=table, world=world, rank=0)
    rows = [sizes(shards, k, dtype, optimizer.fields, accumulate) for k, dtype in enumerate(dtypes)]
    room = budget.host_nbytes // ranks_here
    kept = [residual_nbytes(residual, shards.trained_numel(k)) if residual else 0 for k in range(len(rows))]
    total = sum(sum(row) for row in rows) + sum(kept)
    places = [HOST] * len(rows)
    if total <= room:
        return places
    if budget.disk is not None:
        for k in reversed(range(len(rows))):
            # A layer on disk is updated through a stage on the host.
            stage = max((rows[j][2] for j in range(len(rows)) if places[j] == DISK), default=0)
            if total + stage <= room:
                return places
            total -= rows[k][2]
            places[k] = DISK
        if total + max(row[2] for row in rows) <= room:
            return places
    else:
        there = budget.plan_nbytes - max(_needed(table, layer, dtypes) for layer in table.layers)
        for k, row in enumerate(rows):
            # With one rank a home on the device is the layer's own storage.
            there -= sum(row) + kept[k] + (0 if world == 1 else table.layers[k].numel * dtypes[k].itemsize)
            if there < 0:
                break
            total -= sum(row) + kept[k]
            places[k] = DEVICE
            if total <= room:
                return places
    weights, gradients, rest = (sum(row[i] for row in rows) for i in range(3))
    smaller = isinstance(optimizer, AdamW) and optimizer.state == "fp32"
    raise FitError(
        f"model data takes {format_nbytes(weights + gradients + rest + sum(kept))} on this rank's host (weights "
        f"{format_nbytes(weights)}, gradients {format_nbytes(gradients)}, optimizer {format_nbytes(rest)}"
        f"{f', residuals {format_nbytes(sum(kept))}' if residual else ''}), its share of the host budget is "
        f"{format_nbytes(room)} ({budget.host_origin}, {ranks_here} ranks here), and the device has no room for the rest: "
        f"{format_nbytes(budget.device_nbytes)} ({budget.device_origin}). "
        + (
            "Even with all masters and states on disk the weights do not fit: use more ranks or a larger Memory(host=...)"
            if budget.disk is not None
            else "Use Memory(disk=folder) for masters and states, more ranks, or a larger Memory(host=...)"
        )
        + ("; AdamW(state='int8') takes less, and is other mathematics" if smaller else "")
    )


def _needed(table: ChunkTable, layer: LayerSpace, dtypes: list[torch.dtype]) -> int:
    """What must be on the device while a layer runs."""
    return sum(table.layers[other].numel * dtypes[other].itemsize for other in layer.needs)


def _fits_device(table: ChunkTable, budget: Budget, dtypes: list[torch.dtype]) -> None:
    for layer in table.layers:
        nbytes = _needed(table, layer, dtypes)
        if nbytes > budget.device_nbytes:
            largest = max(layer.slots, key=lambda slot: slot.numel)
            raise FitError(
                f"layer '{layer.path}' has {format_nbytes(nbytes)} of weights, the device budget is "
                f"{format_nbytes(budget.device_nbytes)} ({budget.device_origin}); its largest parameter is {largest.name} "
                f"{largest.shape}. Use a larger Memory(device=...), or split the layer into smaller modules"
            )
