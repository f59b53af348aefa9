"""A rank's part of a tensor, cut out of the whole; a tile of a weight, gathered from shares; a share of a gradient, summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import prod

import torch

from scrimp.layout import Mesh
from scrimp.lower.moves import Arrived, Communicator, Handle, Start, at_once, local_shape, redistribute
from scrimp.lower.weights.rest import Rest, Shared
from scrimp.move import Program, synthesize
from scrimp.planner import Placed

MOST_KEPT = 1 << 14  # programs and sizes, which every step looks up for every weight


def cut(whole: torch.Tensor, place: Placed, mesh: Mesh, rank: int) -> torch.Tensor:
    """A rank's part of a whole tensor, as a view where that is possible."""
    factors = [factor for dim in place.dims for factor in dim]
    found = whole.reshape([size for size, _ in factors])
    for dim, (size, axes) in enumerate(factors):
        found = found.narrow(dim, *part_of(size, axes, mesh, rank))
    return found.reshape(local_shape(place, mesh))


def part_of(size: int, axes: tuple[str, ...], mesh: Mesh, rank: int) -> tuple[int, int]:
    """Where a rank's part of a factor starts, and its length."""
    length = size // prod(mesh.axis_size(axis) for axis in axes)
    return mesh.index(rank, axes) * length, length


def flat_tile(whole: torch.Tensor, each: Rest, mesh: Mesh, rank: int) -> torch.Tensor:
    """A rank's tile of a whole parameter, flat and padded."""
    return padded(cut(whole, each.use, mesh, rank), each, mesh)


def padded(tile: torch.Tensor, each: Rest, mesh: Mesh) -> torch.Tensor:
    """A view of the tile where it lies flat and needs no padding, else one copy."""
    numel = sizes_of(each, mesh)[0]
    if numel == tile.numel():
        return tile.reshape(1, -1)
    flat = tile.new_empty(1, numel)
    flat[:, : tile.numel()].view(tile.shape).copy_(tile)
    flat[:, tile.numel() :].zero_()
    return flat


def gathered(comm: Communicator, share: torch.Tensor, each: Rest, over: tuple[str, ...]) -> torch.Tensor:
    """A tile as operators use it, from its shares over some axes: the share itself, as a view, where there are none."""
    return gathering(comm.mesh, share, each, over, at_once(comm))()


def gathering(mesh: Mesh, share: torch.Tensor, each: Rest, over: tuple[str, ...], start: Start) -> Callable[[], torch.Tensor]:
    """Starts a gather. Returns a function that waits for the tile."""
    handle: Handle = Arrived(share.view(1, -1))
    if over:
        handle = start(_program(mesh, each, (over, ()), ((), ()), share.dtype), share.view(1, -1), False)
    _, numel, shape = sizes_of(each, mesh)
    return lambda: handle.wait()[:, :numel].view(shape)


def summed(
    comm: Communicator,
    gradient: torch.Tensor,
    place: Placed,
    each: Rest,
    over: tuple[str, ...],
    *,
    later: tuple[str, ...] = (),
    donate: bool,
) -> torch.Tensor:
    """A gradient, flat: its share over some axes, summed over the ranks, but not yet along the axes `later`."""
    return summing(comm, gradient, place, each, over, at_once(comm), later=later, donate=donate).wait()


def summing(
    comm: Communicator,
    gradient: torch.Tensor,
    place: Placed,
    each: Rest,
    over: tuple[str, ...],
    start: Start,
    *,
    later: tuple[str, ...] = (),
    donate: bool,
) -> Handle:
    """Starts such a sum."""
    if place.dims != each.use.dims:
        after = replace(each.use, partial=later)
        gradient, donate, place = redistribute(comm, gradient, place, after, donate=donate), True, after
    flat = padded(gradient, each, comm.mesh)
    del gradient
    return _sharing(comm.mesh, flat, each, ((), place.partial), (over, later), start, donate=donate)


def shared(
    comm: Communicator,
    flat: torch.Tensor,
    each: Rest,
    before: Shared,
    after: Shared,
    *,
    donate: bool,
) -> torch.Tensor:
    """Flat shares of a tile, from one way of sharing it to another."""
    return _sharing(comm.mesh, flat, each, before, after, at_once(comm), donate=donate).wait()


def _sharing(
    mesh: Mesh,
    flat: torch.Tensor,
    each: Rest,
    before: Shared,
    after: Shared,
    start: Start,
    *,
    donate: bool,
) -> Handle:
    if before == after:
        return Arrived(flat)
    program = _program(mesh, each, before, after, flat.dtype)
    return start(program, flat.view(1, -1), donate) if program.steps else Arrived(flat)


@lru_cache(maxsize=MOST_KEPT)
def _program(mesh: Mesh, each: Rest, before: Shared, after: Shared, dtype: torch.dtype) -> Program:
    named = str(dtype).removeprefix("torch.")
    return synthesize(each.flat_shape(mesh), mesh, each.layout(*before), each.layout(*after), dtype=named)


@lru_cache(maxsize=MOST_KEPT)
def sizes_of(each: Rest, mesh: Mesh) -> tuple[int, int, tuple[int, ...]]:
    """Elements of a tile with padding and without, and the shape in which operators use it."""
    return each.flat_shape(mesh)[1], each.tile_numel(mesh), local_shape(each.use, mesh)
