"""Steps in which every member of a sub-group sends to every other, each as one all-to-all of the backend.

Gloo's collectives go round a ring, but for this one; and point to point each message wakes a thread. Sums add the members'
summands in the members' order, so that equal runs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from scrimp.layout import Box
from scrimp.move.plan.routes import SMALL_NBYTES, Routes
from scrimp.move.run.holder import Holder, are_in_order, contiguous, free, shape_of, view_of
from scrimp.move.run.requests import AllToAll, Request

Order = Callable[[tuple[int, ...]], tuple[int, ...]]  # mesh ranks as their sub-group numbers them


def _packed(holder: Holder, part: Routes, boxes: list[Box]) -> torch.Tensor:
    """All of an array, flat, as boxes of equal size one behind the other: itself where they lie so, else a copy, and the array is
    freed."""
    array = holder.array
    if array.is_contiguous() and are_in_order(part.before, boxes):
        return array.view(-1)
    packed = array.new_empty((len(boxes), *shape_of(boxes[0])))
    for slot, box in zip(packed, boxes, strict=True):
        slot.copy_(view_of(array, box, part.before))
    del array
    holder.release()
    return packed.view(-1)


def _end(holder: Holder, packed: torch.Tensor) -> None:
    """After a call: frees what was packed, and the array, where it is the same."""
    if packed.untyped_storage().data_ptr() != holder.array.untyped_storage().data_ptr():
        free(packed)
    holder.release()


def all_to_all(holder: Holder, part: Routes, members: tuple[int, ...], rank: int) -> Iterator[Request]:
    """Every member sends a part to every other, in one call."""
    sends, receives = {**dict(part.sends), rank: part.kept}, {**dict(part.receives), rank: part.kept}
    boxes = [receives[member] for member in members]
    packed = _packed(holder, part, [sends[member] for member in members])
    sizes = [packed.numel() // len(members)] * len(members)
    in_order = are_in_order(part.after, boxes)
    out = packed.new_empty(shape_of(part.after) if in_order else (len(members), *shape_of(boxes[0])))
    yield AllToAll(members=members, parts=packed, sizes=sizes, out=out.view(-1), out_sizes=sizes)
    _end(holder, packed)
    if not in_order:
        arrived, out = out, out.new_empty(shape_of(part.after))
        for slot, box in zip(arrived, boxes, strict=True):
            view_of(out, box, part.after).copy_(slot)
        free(arrived)
    holder.array = out


def reduce_scatter(holder: Holder, part: Routes, members: tuple[int, ...], rank: int, order: Order) -> Iterator[Request]:
    """Each member gets all summands of its part, and adds them. All parts have one size."""
    boxes, numbered = {**dict(part.sends), rank: part.after}, order(members)
    packed = _packed(holder, part, [boxes[member] for member in numbered])
    sizes = [packed.numel() // len(members)] * len(members)
    summands = packed.new_empty((len(members), *shape_of(part.after)))
    yield AllToAll(members=numbered, parts=packed, sizes=sizes, out=summands.view(-1), out_sizes=sizes)
    _end(holder, packed)
    holder.array = _summed(summands, numbered, members)


def all_reduce(holder: Holder, members: tuple[int, ...], rank: int, order: Order) -> Iterator[Request]:
    """A reduce-scatter and a gather of the flat array, or, if it is small, a gather of all summands. All members add in the same
    order."""
    shape, numbered, n = holder.array.shape, order(members), len(members)
    me = numbered.index(rank)
    flat = contiguous(holder).view(-1)
    size = flat.numel()
    if n * flat.nbytes <= SMALL_NBYTES:
        summands = flat.new_empty((n, size))
        copies = flat.repeat(n)
        yield AllToAll(members=numbered, parts=copies, sizes=[size] * n, out=summands.view(-1), out_sizes=[size] * n)
        del flat, copies
        holder.release()
        holder.array = _summed(summands, numbered, members).view(shape)
        return
    sizes = [size * (k + 1) // n - size * k // n for k in range(n)]
    summands = flat.new_empty((n, sizes[me]))
    yield AllToAll(members=numbered, parts=flat, sizes=sizes, out=summands.view(-1), out_sizes=[sizes[me]] * n)
    del flat
    holder.release()
    mine = _summed(summands, numbered, members)
    del summands
    copies = mine.repeat(n)
    total = mine.new_empty(size)
    yield AllToAll(members=numbered, parts=copies, sizes=[sizes[me]] * n, out=total, out_sizes=sizes)
    free(copies)
    holder.array = total.view(shape)


def small_all_gather(holder: Holder, part: Routes, members: tuple[int, ...]) -> Iterator[Request]:
    """In one call, with a copy for each member."""
    array = contiguous(holder)
    size, gathered = array.numel(), array.new_empty((len(members), *array.shape))
    sizes, copies = [size] * len(members), array.reshape(-1).repeat(len(members))
    yield AllToAll(members=members, parts=copies, sizes=sizes, out=gathered.view(-1), out_sizes=sizes)
    del array
    holder.release()
    holder.array = placed(gathered, part, members)


def _summed(summands: torch.Tensor, numbered: tuple[int, ...], members: tuple[int, ...]) -> torch.Tensor:
    """Adds in the members' order, so that replicas in other sub-groups have the same bits, however these are numbered."""
    number = {member: k for k, member in enumerate(numbered)}
    in_order = summands if numbered == members else summands[[number[member] for member in members]]
    total = torch.sum(in_order, 0, dtype=summands.dtype)
    free(summands)
    return total


def placed(gathered: torch.Tensor, part: Routes, members: tuple[int, ...]) -> torch.Tensor:
    """The array that the members' parts make up: in place where they lie one behind the other in it."""
    receives = dict(part.receives)
    boxes = [receives.get(member, part.kept) for member in members]
    if are_in_order(part.after, boxes):
        return gathered.view(shape_of(part.after))
    out = gathered.new_empty(shape_of(part.after))
    for slot, box in zip(gathered, boxes, strict=True):
        view_of(out, box, part.after).copy_(slot)
    return out
