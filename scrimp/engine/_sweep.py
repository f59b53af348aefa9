"""The update: what landed, layer by layer, each where its home is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from scrimp.chunks._home import DEVICE
from scrimp.chunks._optim import Optimizer
from scrimp.chunks._store import Store
from scrimp.chunks._table import Slot
from scrimp.chunks._update import Updater


@dataclass(frozen=True, kw_only=True)
class Place:
    """The homes, and who updates them; on the device only when something is there."""

    store: Store
    host: Updater
    device: Callable[[], Updater]


def sweep(
    place: Place,
    landed: list[tuple[int, Slot]],
    optimizers: Mapping[str, Optimizer],
    counts: dict[str, int],
    *,
    step: int,
    scale: torch.Tensor | None,
) -> Updater | None:
    """`counts` says how often each parameter was updated. The device's updater, if one was made."""
    there, store = None, place.store
    by_layer: dict[int, list[Slot]] = {}
    for layer, slot in landed:
        by_layer.setdefault(layer, []).append(slot)
    for layer, slots in by_layer.items():
        updater, factor = place.host, scale
        if store.homes[layer].place == DEVICE:
            there = there or place.device()
            updater, factor = there, None if scale is None else scale.to(store.device)
        with store.opened(layer, write=True) as data:
            for slot in slots:
                count = counts[slot.name] = counts.get(slot.name, 0) + 1
                for piece in data.pieces(slot):
                    updater.apply(optimizers[slot.name], step, count, piece, factor, own_master=data.own_master)
        store.settled(layer)
    return there


def restore_all(store: Store, landed: Iterable[tuple[int, Slot]]) -> None:
    """Instead of an update: weights again where gradients stand."""
    for layer, slot in landed:
        store.restore(layer, slot)
    for layer, space in enumerate(store.table.layers):
        if store.anchored(layer):  # gradients that stand there without having been retired
            for slot in space.slots[: sum(slot.trainable for slot in space.slots)]:
                store.restore(layer, slot)
