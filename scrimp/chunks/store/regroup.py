"""Shards a store's layers over another group of ranks, in memory: by direct exchanges of at most one chunk.

The unit is one tensor of one layer: its weights, its master weights, one of its states. Its new shard is allocated, filled window
by window, and the old shard is freed before the next tensor. So at no time a rank holds more than the larger of its old and its
new share, the smaller share of the largest tensor, and one part of a chunk that has just arrived. The host's ledger counts all of
it. Gradients are not moved: between steps there are none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from scrimp.chunks.store.disk_tier import Spilling
from scrimp.chunks.store.placement import HOST, Placement, optimized
from scrimp.chunks.tables.regroup import Grouping, Part, content_numel, windows
from scrimp.chunks.tables.shards import Shards
from scrimp.chunks.tables.state_codec import Field
from scrimp.chunks.transfer.collectives import Wire
from scrimp.chunks.transfer.host_arena import arena
from scrimp.layout import Box
from scrimp.move import run_between

if TYPE_CHECKING:
    from scrimp.chunks.store.store import Store


@dataclass(frozen=True, kw_only=True)
class Regrouping:
    """`everyone`: the ranks of both groups, and perhaps others; members are numbered as there. `wire`: of the new group; one rank
    alone where this one is not in it. `host_room_nbytes`: this rank's share of the host afterwards."""

    everyone: Wire
    old: Grouping
    new: Grouping
    wire: Wire
    host_room_nbytes: int


def absent(store: Store, layer: int) -> Placement:
    """The placement of a layer on a rank that is in no group: empty."""
    nothing = torch.empty(0, dtype=store.dtype_of(layer))
    return Placement(tier=HOST, weights=nothing, gradients=None, master=None)


def regroup(store: Store, change: Regrouping) -> None:
    """A collective of `everyone`. All layers are on the host, no update is running, and no layer is on the device."""
    rank, shards = change.everyone.rank, Shards(table=change.new.table, world=change.wire.world, rank=change.wire.rank)
    inside = rank in change.new.members
    for layer in range(len(change.new.table.layers)):
        store.placements[layer] = _regrouped(store, layer, change, shards if inside else None)
    store.table, store.shards, store.outside = change.new.table, shards, not inside
    store.wire = store.ranks = change.wire
    store.host_room_nbytes = change.host_room_nbytes
    for layer, flat in enumerate(store.flats):
        storage = flat.untyped_storage()
        storage.resize_(store.nbytes(layer))  # a view needs allocated storage
        store.flats[layer] = flat.as_strided((store.table.layers[layer].numel,), (1,), 0)
        storage.resize_(0)
    store.spill = Spilling(store.placements, store.shards, store.optimizer.fields, store.books.host, store.traffic)


def _regrouped(store: Store, layer: int, change: Regrouping, shards: Shards | None) -> Placement:
    old, host, dtype = store.placements[layer], store.books.host, store.dtype_of(layer)
    space = change.new.table.layers[layer]
    old._opened = None  # it refers to the tensors that go one by one
    if old.gradients is not None:
        host.free("gradients", old.gradients.nbytes)
        old.gradients = None
    numel, trained = (0, 0) if shards is None else (shards.numel(layer), shards.trained_numel(layer))
    fields = optimized(dtype, store.optimizer.fields)
    made = [_moved(store, layer, change, Field(dtype=dtype), old, "weights", numel, content_numel(space))]
    for k, field in enumerate(fields):
        made.append(_moved(store, layer, change, field, old, k, field.numel(trained), space.trained))
    own_master = dtype == torch.float32
    placement = Placement(tier=HOST, weights=made[0], gradients=None, master=None if own_master else made[1])
    placement.states = made[1:] if own_master else made[2:]
    if shards is not None and (own_master or store.micro_batches > 1):
        placement.gradients = arena(shards.summed_numel(layer), dtype, pinned=store.copy_streams.overlapped)
        host.charge("gradients", placement.gradients.nbytes)
        store.own(placement.gradients)
    return placement


def _moved(
    store: Store, layer: int, change: Regrouping, field: Field, placement: Placement, which: str | int, numel: int, until: int
) -> torch.Tensor:
    """The new shard of one tensor of a layer; the placement loses the old one. `until`: elements that are not only padding."""
    host, kind = store.books.host, "parameters" if which == "weights" else "optimizer"
    pinned = store.copy_streams.overlapped and which == "weights"
    new = arena(numel, field.dtype, pinned=pinned)
    host.charge(kind, new.nbytes)
    store.own(new)
    old = _taken(placement, which)
    nbytes = 0 if old is None else old.nbytes
    everyone, rank = change.everyone, change.everyone.rank
    for start, stop in windows(change.old.table, change.new.table, until):
        before, after = ([each.part(layer, r, start, stop) for r in range(everyone.world)] for each in (change.old, change.new))
        mine = torch.empty(0, dtype=field.dtype) if old is None else old[field.span(before[rank].arena)]
        if [part.inside for part in before] == [part.inside for part in after]:
            new[field.span(after[rank].arena)] = mine
            continue
        arrived = _exchange(everyone, field, before, after, mine)
        host.charge("temporaries", arrived.nbytes)
        new[field.span(after[rank].arena)] = arrived.cpu()
        host.free("temporaries", arrived.nbytes)
    del old
    host.free(kind, nbytes)
    return new


def _taken(placement: Placement, which: str | int) -> torch.Tensor | None:
    """One tensor of a placement, which then has no reference to it; None on a rank that was outside."""
    if which == "weights":
        found, placement.weights = placement.weights, placement.weights.new_empty(0)
        return found if found.numel() else None
    assert isinstance(which, int)
    if placement.master is not None:
        if which == 0:
            found, placement.master = placement.master, placement.master.new_empty(0)
            return found
        which -= 1
    if not placement.states:
        return None
    found, placement.states[which] = placement.states[which], placement.states[which].new_empty(0)
    return found


def _exchange(everyone: Wire, field: Field, before: list[Part], after: list[Part], mine: torch.Tensor) -> torch.Tensor:
    def boxes(parts: list[Part]) -> Iterator[Box]:
        for part in parts:
            span = field.span(part.inside)
            yield ((span.start, span.stop),)

    ends = tuple(boxes(before)), tuple(boxes(after))
    key = hashlib.sha256(repr(("regroup", ends)).encode()).hexdigest()
    return run_between(everyone.mesh, *ends, mine.to(everyone.device), sums=(), key=key, group=everyone.group)
