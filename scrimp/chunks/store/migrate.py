"""Moves a layer between tiers: host to device and back, or host to streamed and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from scrimp.chunks.store.placement import DEVICE, HOST, STREAMED, Placement, Tier
from scrimp.chunks.transfer.host_arena import arena
from scrimp.chunks.transfer.staged_copy import carry
from scrimp.chunks.update.streamed import pin

if TYPE_CHECKING:
    from scrimp.chunks.store.store import Store


def migrate(store: Store, layer: int, tier: Tier) -> None:
    store.at_rest(layer)
    store.arrived(layer)
    store.copy_streams.settle()
    if STREAMED in (tier, store.placements[layer].tier):
        _stream_update(store, layer, streamed=tier == STREAMED)
        return
    was_here = store.resident[layer]
    try:
        new = store.make_placement(layer, tier)
    except BaseException:  # restore: nothing is charged before the placement exists
        if not was_here:
            store.drop(layer)
        raise
    for tensor in new.tensors:
        store.own(tensor)
    old = store.placements[layer]
    kept = (new.tensors, old.tensors) if store.pending else (_lasting(new), _lasting(old))
    for target, source in zip(*kept, strict=True):
        carry(target, source)
    store.placements[layer] = new
    if tier == DEVICE:
        store.charge_host(layer, old, -1)
        return
    del old, kept, source  # free them before the ledger changes, or the meter would count them as something else
    store.before_change()
    store.charge_device(layer, -1)
    store.drop(layer)


def _stream_update(store: Store, layer: int, *, streamed: bool) -> None:
    """From host to streamed or back: only the weights move, masters and states stay on the host."""
    old = store.placements[layer]
    assert old.gradients is None
    assert old.tier == (HOST if streamed else STREAMED)
    if streamed and not store.resident[layer]:
        store.open(layer)
    weights = (
        store.flats[layer] if streamed else arena(old.weights.numel(), old.weights.dtype, pinned=store.copy_streams.overlapped)
    )
    store.own(weights)
    carry(weights, old.weights)
    store.charge_host(layer, old, -1)
    store.placements[layer] = replace(old, tier=STREAMED if streamed else HOST, weights=weights)
    store.charge_host(layer, store.placements[layer], 1)
    if streamed and store.copy_streams.overlapped:
        pin(store.placements[layer])
    elif not streamed:
        store.drop(layer)


def _lasting(placement: Placement) -> list[torch.Tensor]:
    """Tensors that last from step to step; gradients do not, once they are used."""
    return [tensor for tensor in placement.tensors if tensor is not placement.gradients]
