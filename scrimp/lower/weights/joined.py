"""Several weights gathered in one move, and several gradients reduced in one: as one flat array of all their shares.

    shares    | a0 | b0 |    | a1 | b1 |            one row on each rank
    gathered  | a0 | b0 | a1 | b1 |                 every rank has all rows
    tiles     | a0 | a1 |    | b0 | b1 |            a copy each

Numbers are those of separate moves, bit for bit: a sum adds the same summands in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch

from scrimp.layout import Layout, Mesh
from scrimp.lower.moves import Communicator, Handle, Start, at_once, native_on
from scrimp.lower.weights.rest import Rest, Shared
from scrimp.lower.weights.tiles import sizes_of
from scrimp.move import synthesize


def gathered_together(comm: Communicator, shares: Sequence[torch.Tensor], of: Sequence[Rest]) -> list[torch.Tensor]:
    """Tiles as operators use them, from their shares over the same axes."""
    return gathering_together(comm, shares, of, at_once(comm))()


def gathering_together(
    comm: Communicator, shares: Sequence[torch.Tensor], of: Sequence[Rest], start: Start
) -> Callable[[], list[torch.Tensor]]:
    """Starts such a gather. Returns a function that waits for the tiles."""
    arriving, mesh = sharing_together(comm, shares, of[0].weight, (), start), comm.mesh

    def finish() -> list[torch.Tensor]:
        found = []
        for rows, each in zip(arriving(), of, strict=True):
            _, numel, shape = sizes_of(each, mesh)
            found.append(rows.reshape(-1)[:numel].view(shape))
        return found

    return finish


def shared_together(
    comm: Communicator, shares: Sequence[torch.Tensor], before: tuple[str, ...], after: tuple[str, ...]
) -> Iterable[torch.Tensor]:
    """Flat shares of several tiles over the axes `before`, as shares over the axes `after`, which come first among them. Each is
    a matrix with a row for each share, a view of the one array in which all of them arrive."""
    return sharing_together(comm, shares, before, after, at_once(comm))()


def sharing_together(
    comm: Communicator, shares: Sequence[torch.Tensor], before: tuple[str, ...], after: tuple[str, ...], start: Start
) -> Callable[[], Iterable[torch.Tensor]]:
    """Starts such a move."""
    assert before[: len(after)] == after, (before, after)
    mesh, gone, flats = comm.mesh, before[len(after) :], [share.view(-1) for share in shares]
    members, sizes = prod(map(mesh.axis_size, gone)), [flat.numel() for flat in flats]
    if native_on(comm, flats[0]):
        handle = _moving(mesh, torch.cat(flats), (gone, ()), ((), ()), start)
    else:  # gloo's fastest collective is the all-to-all: a copy for each member goes there
        handle = _spreading(mesh, torch.cat(flats * members), gone, start)
    return lambda: torch.split(handle.wait().view(members, -1), sizes, dim=1)


def summed_together(comm: Communicator, flats: list[torch.Tensor], before: Shared, after: Shared) -> list[torch.Tensor]:
    """Flat shares of several gradients, from one way of sharding them to another. Axes that shard them before come first among
    those that shard them after. Empties `flats`."""
    return summing_together(comm.mesh, flats, before, after, at_once(comm))()


def summing_together(
    mesh: Mesh, flats: list[torch.Tensor], before: Shared, after: Shared, start: Start
) -> Callable[[], list[torch.Tensor]]:
    """Starts such a sum."""
    held, (over, later) = before[0], after
    assert over[: len(held)] == held, (before, after)
    rows = prod(map(mesh.axis_size, over[len(held) :]))
    sizes = [flat.numel() // rows for flat in flats]
    packed = flats[0].new_empty((rows, sum(sizes)))
    for target in torch.split(packed, sizes, dim=1):
        target.copy_(flats.pop(0).view(rows, -1))
    flat = packed.view(-1)
    del packed, target
    handle = _moving(mesh, flat, ((), before[1]), (over[len(held) :], later), start)
    return lambda: [*torch.split(handle.wait().view(1, -1), sizes, dim=1)]


def _spreading(mesh: Mesh, copies: torch.Tensor, axes: tuple[str, ...], start: Start) -> Handle:
    """Part k of a flat array goes to member k along the axes."""
    others = tuple(axis for axis in mesh.names if axis not in axes)
    count, members = (prod(map(mesh.axis_size, each)) for each in (others, axes))
    src, dst = Layout(dims=(others, axes, ())), Layout(dims=(others, (), axes))
    dtype = str(copies.dtype).removeprefix("torch.")
    program = synthesize((count, members, copies.numel()), mesh, src, dst, dtype=dtype)
    return start(program, copies.view(1, 1, -1), True)


def _moving(mesh: Mesh, flat: torch.Tensor, before: Shared, after: Shared, start: Start) -> Handle:
    """One flat array from one way of sharding it to another. Along all other axes of the mesh ranks hold arrays of their own."""
    used = {*before[0], *before[1], *after[0], *after[1]}
    others = tuple(axis for axis in mesh.names if axis not in used)
    count, shards = (prod(map(mesh.axis_size, axes)) for axes in (others, before[0]))
    src, dst = (Layout(dims=(others, axes), partial=partial) for axes, partial in (before, after))
    program = synthesize((count, flat.numel() * shards), mesh, src, dst, dtype=str(flat.dtype).removeprefix("torch."))
    return start(program, flat.view(1, -1), True)
