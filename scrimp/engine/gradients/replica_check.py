"""Ranks that hold replicas compare checksums of their weights every few steps, because a difference would grow silently."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from scrimp.chunks import Store, Wire
from scrimp.errors import RunError

if TYPE_CHECKING:
    from scrimp.engine._training import Training


def compare_replicas(engine: Training, store: Store, wire: Wire) -> None:
    """Raise unless all ranks of `wire` have the same weights."""
    if wire.world == 1:
        return
    store.wait()
    sums = []
    for layer in range(len(store.table.layers)):
        master = store.direct(layer).master
        sums.append(int(torch.sum(master.view(torch.int32), dtype=torch.int64)))
    gpus = store.wire.world  # ranks that shard model data hold different parts of it
    every = engine.wire.every(torch.tensor(sums))[engine.wire.rank % gpus :: gpus]
    for layer, column in enumerate(every.unbind(1)):
        _compare(engine, store, layer, column)


def compare_tiles(engine: Training, store: Store) -> None:
    """Raise, on all ranks, unless ranks that update the same part of a parameter have the same weights, along all mesh axes."""
    tiling, ranks = store.tiling, store.ranks
    assert tiling is not None
    store.wait()
    slots = [(layer, slot) for layer, space in enumerate(store.table.layers) for slot in space.slots if slot.trainable]
    masters = [store.direct(layer).piece(slot, 0).master for layer, slot in slots]
    sums = [int(torch.sum(master.view(torch.int32), dtype=torch.int64)) for master in masters]
    for (layer, slot), column in zip(slots, ranks.every(torch.tensor(sums)).unbind(1), strict=True):
        labels = [tiling.label(slot.name, rank) for rank in range(ranks.world)]
        for label in dict.fromkeys(labels):
            _compare(engine, store, layer, column[[other == label for other in labels]])


def _compare(engine: Training, store: Store, layer: int, sums: torch.Tensor) -> None:
    if not bool((sums == sums[0]).all()):
        path = store.table.layers[layer].path
        raise RunError(
            f"step {engine.steps}: the ranks' weights of layer '{path}' are no longer the same (checksums "
            f"{sums.tolist()}); load the last checkpoint"
        )
