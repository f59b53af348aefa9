"""A tensor from one placement to another on this rank.

The local tensor is seen in memory order and with its dims as factors, so that a move keeps the order in which dims lie in memory:
an attention kernel's result follows its query, and a view that was free would become a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch

from scrimp.layout import Layout, Mesh
from scrimp.lower.comm import Communicator
from scrimp.move import Program, synthesize
from scrimp.planner import Placed, between, common, unsplit


def local_shape(place: Placed, mesh: Mesh) -> tuple[int, ...]:
    return tuple(
        prod(size for size, _ in dim) // prod(mesh.axis_size(axis) for _, axes in dim for axis in axes) for dim in place.dims
    )


def redistribute(
    comm: Communicator, local: torch.Tensor, before: Placed, after: Placed, order: Sequence[int] = (), *, donate: bool
) -> torch.Tensor:
    if order:
        back = sorted(range(len(order)), key=order.__getitem__)
        moved = redistribute(comm, local.permute(*order), before.permuted(order), after.permuted(order), donate=donate)
        return moved.permute(*back)
    for program, tile, shape in _programs(before, after, comm.mesh, comm.rank, local.dtype):
        made = comm.move(program, local.reshape(tile), donate=donate)
        local, donate = made.reshape(shape), True
    return local


def made_whole(comm: Communicator, local: torch.Tensor, before: Placed) -> torch.Tensor:
    """All of a tensor on every rank: itself where that is so."""
    whole = unsplit(before.shape)
    return local if before == whole else redistribute(comm, local, before, whole, donate=False)


def _hops(before: Placed, after: Placed, mesh: Mesh) -> tuple[tuple[tuple[int, ...], Layout, Layout, Placed], ...]:
    """One hop, or two over a placement that shares factors with both ends."""
    found = common(before, after, mesh)
    if found is not None:
        return ((*found, after),)
    middle = between(before, after, mesh)
    return (*_hops(before, middle, mesh), *_hops(middle, after, mesh))


@lru_cache(maxsize=1 << 14)
def _programs(
    before: Placed, after: Placed, mesh: Mesh, rank: int, dtype: torch.dtype
) -> tuple[tuple[Program, tuple[int, ...], tuple[int, ...]], ...]:
    """Of each hop the program, the tile that it takes, and the local shape of its result."""
    found = []
    for shape, src, dst, place in _hops(before, after, mesh):
        program = synthesize(shape, mesh, src, dst, dtype=str(dtype).removeprefix("torch."))
        found.append((program, src.local_shape(shape, mesh, rank), local_shape(place, mesh)))
    return tuple(found)
