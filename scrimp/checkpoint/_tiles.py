"""Parameters that a plan splits: what each rank writes of them, and a whole parameter from what all ranks wrote.

A rank writes the part of each parameter that it updates, unless another rank, the first of those that update the same, writes it:
elements [start, stop) of a tile, flat. A tile is a box of the parameter, whose dims the plan may see as products of factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from scrimp.checkpoint._manifest import Entry, Extent
from scrimp.chunks import Opened, Slot, Store


def extents_of(store: Store, layer: int, slot: Slot) -> tuple[Extent, ...]:
    """Of all ranks."""
    found = []
    for rank in range(store.ranks.world):
        for place, other, extent in _written(store, layer, rank):
            if other.name == slot.name:
                found.append(Extent(start=extent[1], length=extent[2] - extent[1], rank=rank, place=place, box=extent[0]))
    return tuple(found)


def written_numel(store: Store, layer: int) -> tuple[int, int]:
    """Elements that this rank writes of a layer: of weights, and of masters and states."""
    rows = [(extent[2] - extent[1], slot.trainable) for _, slot, extent in _written(store, layer, store.ranks.rank)]
    return sum(numel for numel, _ in rows), sum(numel for numel, trainable in rows if trainable)


def written(store: Store, data: Opened, which: str | int, *, rounded: bool = False) -> Iterator[torch.Tensor]:
    """This rank's parts of a layer; trained ones first, as in the table. `rounded`: weights are made from masters."""
    for _, slot, (_, start, stop) in _written(store, data.layer, store.ranks.rank):
        if slot.trainable or which == "weights":
            (piece,) = data.pieces(slot)
            if which == "weights" and rounded and slot.trainable and not data.own_master:
                yield piece.master[: stop - start].to(piece.weight.dtype)
                continue
            whole = piece.states[which] if isinstance(which, int) else piece.weight if which == "weights" else piece.master
            yield whole[: stop - start]


def _written(store: Store, layer: int, rank: int) -> Iterator[tuple[int, Slot, tuple[Any, int, int]]]:
    assert store.tiling is not None
    place = 0
    for slot in store.table.layers[layer].slots:
        extent = store.tiling.extent(slot.name, rank)
        if extent is not None:
            yield place, slot, extent
            place += extent[2] - extent[1]


def whole(files: list[Any], entry: Entry, key: str) -> torch.Tensor:
    """A parameter, or a state of it, from the files of all ranks; `key` begins the name of the tensors that hold it."""
    found: torch.Tensor | None = None
    tiles: dict[Any, torch.Tensor] = {}
    for extent in entry.extents:
        part = files[extent.rank].get_slice(f"{key}.{entry.layer}")[extent.place : extent.place + extent.length]
        if found is None:
            found = torch.empty(entry.shape, dtype=part.dtype, device="cpu")
        if extent.box is None:
            found.view(-1)[extent.start : extent.start + extent.length] = part
            continue
        if extent.box not in tiles:
            tiles[extent.box] = torch.empty(prod(length for _, _, length in extent.box), dtype=part.dtype, device="cpu")
        tiles[extent.box][extent.start : extent.start + extent.length] = part
    assert found is not None
    for box, tile in tiles.items():
        into = found.view([size for size, _, _ in box])
        for dim, (_, start, length) in enumerate(box):
            into = into.narrow(dim, start, length)
        into.copy_(tile.view(into.shape))
    return found
