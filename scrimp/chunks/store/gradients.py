"""Gradients on their way from the device to the tier of their layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from scrimp.chunks.store.placement import DEVICE, STREAMED
from scrimp.chunks.tables.table import Slot, runs_of
from scrimp.chunks.transfer.copy_streams import Event

if TYPE_CHECKING:
    from scrimp.chunks.store.store import Store


def retire(store: Store, layer: int, arrived: list[tuple[Slot, bool]]) -> None:
    """Average a layer's gradients over the ranks, and copy them."""
    placement = store.placements[layer]
    events: list[Event] = []
    runs = runs_of(arrived)
    for (start, stop), shard in zip(store.table.chunks(layer), store.shards.chunks(layer), strict=True):
        if not any(begin < stop and end > start for begin, end, _ in runs):
            continue
        mine = store.wire.reduce(store.flats[layer][start:stop])
        offset = start + store.wire.rank * mine.numel()  # where this rank's shard begins in the layer
        into = (placement.weights if placement.gradients is None else placement.gradients)[shard.start :]
        for run_start, run_stop, first in runs:
            begin, end = max(run_start, offset), min(run_stop, offset + mine.numel())
            if begin >= end:
                continue
            target, source = into[begin - offset : end - offset], mine[begin - offset : end - offset]
            if placement.tier == DEVICE:
                target.copy_(source) if first else target.add_(source)
                continue
            if first:
                events.append(store.copy_streams.down(target, source))
            else:
                store.arrived_on_host(layer)
                target.add_(source.to(target.device))
            store.traffic.down_nbytes += target.nbytes
        if store.wire.world > 1:
            for event in events:
                store.copy_streams.wait(event)  # `mine` is a temporary, not the layer's storage, and is freed now
    store.leaving[layer] = events
    store.coming_down[layer] = [*store.coming_down.get(layer, []), *events]


def take(store: Store, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
    """Copy a gradient, or add it, to where the layer's tier keeps it."""
    placement, (spans,) = store.placements[layer], store.shards.pieces(layer, slot)
    assert slot.share is not None
    if placement.gradients is None:
        target = placement.weights[spans.weights]
    elif gradient.numel() == spans.gradients.stop - spans.gradients.start:
        target = placement.gradients[spans.gradients]
    else:
        begin, end = slot.share.summed
        target = placement.gradients[slot.share.gradient_start :][: end - begin]
    gradient = gradient.view(-1)
    if placement.tier in (DEVICE, STREAMED):
        target.copy_(gradient) if first else target.add_(gradient)
        if placement.gradients is None:
            store.as_gradients[layer] += target.nbytes
            store.ledger.move(target.nbytes, source="parameters", target="gradients")
        return
    if first:
        event = store.copy_streams.down(target, gradient)
        store.copy_streams.wait(event)  # the gradient is a temporary, and is freed now
        store.coming_down[layer] = [*store.coming_down.get(layer, []), event]
    else:
        store.arrived_on_host(layer)
        target.add_(gradient.to(target.device))
    store.traffic.down_nbytes += target.nbytes
