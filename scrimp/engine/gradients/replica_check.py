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
        if not bool((column == column[0]).all()):
            path = store.table.layers[layer].path
            raise RunError(
                f"step {engine.steps}: the ranks' weights of layer '{path}' are no longer the same (checksums "
                f"{column.tolist()}); load the last checkpoint"
            )
