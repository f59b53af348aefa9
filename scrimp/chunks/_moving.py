"""A layer's home moves: between host and device, or so that its masters and states pass through the device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from scrimp.chunks._arena import arena
from scrimp.chunks._carry import carry
from scrimp.chunks._home import DEVICE, HOST, THROUGH, Home
from scrimp.chunks._through import pin

if TYPE_CHECKING:
    from scrimp.chunks._store import Store


def move_home(store: Store, layer: int, place: str) -> None:
    store.at_rest(layer)
    store.arrived(layer)
    store.lanes.settle()
    if THROUGH in (place, store.homes[layer].place):
        _pass_through(store, layer, through=place == THROUGH)
        return
    was_here = store.resident[layer]
    try:
        new = store.make_home(layer, place)
    except BaseException:  # as it was: nothing is charged before it is there
        if not was_here:
            store.drop(layer)
        raise
    for tensor in new.tensors:
        store.own(tensor)
    old = store.homes[layer]
    kept = (new.tensors, old.tensors) if store.pending else (_lasting(new), _lasting(old))
    for target, source in zip(*kept, strict=True):
        carry(target, source)
    store.homes[layer] = new
    if place == DEVICE:
        store.charge_host(layer, old, -1)
        return
    del old, kept, source  # gone before the ledger is told, or the meter would take them for something else
    store.before_change()
    store.charge_device(layer, -1)
    store.drop(layer)


def _pass_through(store: Store, layer: int, *, through: bool) -> None:
    """From a home on the host to one whose masters and states pass through the device, or back: they stay."""
    old = store.homes[layer]
    assert old.gradients is None
    assert old.place == (HOST if through else THROUGH)
    if through and not store.resident[layer]:
        store.open(layer)
    weights = store.flats[layer] if through else arena(old.weights.numel(), old.weights.dtype, pinned=store.lanes.overlapped)
    store.own(weights)
    carry(weights, old.weights)
    store.charge_host(layer, old, -1)
    store.homes[layer] = replace(old, place=THROUGH if through else HOST, weights=weights)
    store.charge_host(layer, store.homes[layer], 1)
    if through and store.lanes.overlapped:
        pin(store.homes[layer])
    elif not through:
        store.drop(layer)


def _lasting(home: Home) -> list[torch.Tensor]:
    """What lasts from step to step: gradients do not, once they are used."""
    return [tensor for tensor in home.tensors if tensor is not home.gradients]
