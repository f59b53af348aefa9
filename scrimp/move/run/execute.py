"""Executes the steps of a program on one rank's array.

Memory: a step packs what it sends, frees its input, receives, frees what it sent, and unpacks, so that no more than two arrays of
a tile's size are live at a time. Contiguous parts are sent and received in place. Where some rank must send more than a tile (few
holders, many receivers), the exchange goes in rounds through a staging buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from scrimp.layout import Box, Mesh, box_numel
from scrimp.move.plan.routes import Routes, routes
from scrimp.move.program import Program, Step
from scrimp.move.run.requests import AllReduce, AllToAll, Exchange, Gather, Part, ReduceScatter, Request

STAGE_FLOOR_NBYTES = 1 << 20
STAGE_SHARE = 8
SMALL_NBYTES = 1 << 12  # summands of all members: so few are sent to all, in one call


def stage_nbytes(tile_nbytes: int) -> int:
    """Bytes that a run may hold beyond two tiles of the larger size."""
    return max(STAGE_FLOOR_NBYTES, tile_nbytes // STAGE_SHARE)


Order = Callable[[tuple[int, ...]], tuple[int, ...]]


class Holder:
    """The array between steps. It has the only reference to the array, so that `release` frees the memory at once."""

    def __init__(self, local: torch.Tensor, *, donate: bool) -> None:
        self.array = local
        self._input: torch.Tensor | None = local
        self._donate = donate

    def release(self) -> None:
        """Frees the array: all parts still needed have been packed."""
        if self._input is None:
            _free(self.array)
        elif self._donate:
            _free(self._input)
        self.array = self.array.new_empty(0)
        self._input = None

    def finish(self) -> torch.Tensor:
        """The result: contiguous, and sharing no storage with an input."""
        if self._input is None and self.array.is_contiguous():
            return self.array
        result = self.array.clone(memory_format=torch.contiguous_format)
        self.release()
        return result


def _free(array: torch.Tensor) -> None:
    """Frees the memory of an array at once. The backend's thread may hold the tensors of its last call a moment longer."""
    storage = array.untyped_storage()
    # Contiguous and as large as the storage: it is all of it, not an expanded view.
    if storage.resizable() and array.is_contiguous() and storage.nbytes() == array.nbytes:
        storage.resize_(0)


def overload(program: Program, rank: int) -> int:
    """The most tiles' worth that this rank sends in a step with arbitrary exchanges, rounded up."""
    loose = [step for step in program.steps if step.kind in ("exchange", "direct")]
    most = max((routes(program, step, rank).sent_numel for step in loose), default=0)
    return -(-most // max(program.cap_numel, 1))


def execute(
    program: Program, step: Step, rank: int, holder: Holder, *, order: Order, native: bool, load: int
) -> Iterator[Request]:
    """Runs one step. `order`: mesh ranks as their sub-group numbers them. If `native`, gathers and sums are collectives of the
    backend. `load` is the largest overload of any rank."""
    members = program.mesh.group(rank, step.axes)
    if step.kind == "all_reduce" and 0 in program.shape:
        return
    if step.kind == "all_reduce":
        yield from _native_all_reduce(holder, order(members)) if native else _all_reduce(holder, members, rank, order)
        return
    part = routes(program, step, rank)
    even = program.padded == program.shape and 0 not in program.shape
    native = native and even  # collectives of the backend need equal, non-empty parts
    together = even and holder.array.device.type == "cpu"
    if step.kind == "slice":
        holder.array = _view(holder.array, part.after, part.before)
    elif step.kind == "reduce_scatter" and native:
        yield from _native_reduce_scatter(holder, part, order(members), rank)
    elif step.kind == "reduce_scatter":
        largest = step.after.local_numel(program.shape, program.mesh, program.padded)
        per_round = max(1, program.cap_numel // max(largest, 1))
        if per_round < len(members):
            yield from _reduce_scatter_in_rounds(holder, part, members, rank, per_round)
        elif together:
            yield from _reduce_scatter_together(holder, part, members, rank, order)
        else:
            yield from _reduce_scatter(holder, part, members, rank)
    elif step.kind == "all_gather" and native:
        yield from _native_all_gather(holder, part, order(members))
    elif step.kind == "all_to_all" and together:
        yield from _all_to_all(holder, part, order(members), rank)
    elif step.kind in ("exchange", "direct") and load > 1:
        nbytes = (load + 1) * program.cap_numel * program.itemsize
        yield from _exchange_in_rounds(holder, part, -(-nbytes // stage_nbytes(program.cap_numel * program.itemsize)))
    else:
        yield from _exchange(holder, part)


def execute_between(
    mesh: Mesh, part: Routes, rank: int, holder: Holder, sums: tuple[str, ...], order: Order
) -> Iterator[Request]:
    """Sums over axes, then a direct exchange along given routes."""
    if sums:
        yield from _all_reduce(holder, mesh.group(rank, sums), rank, order)
    yield from _exchange(holder, part)


def _pack(holder: Holder, part: Routes) -> tuple[list[Part], torch.Tensor, bool]:
    """The parts to send, the part to keep, and whether both are copies: then the array has been freed."""
    array = holder.array
    parts = [Part(peer, _view(array, box, part.before)) for peer, box in part.sends]
    kept = _view(array, part.kept, part.before)
    if array.is_contiguous() and all(_is_one_piece(part.before, box) for _, box in part.sends):
        return parts, kept, False
    copies: dict[Box, torch.Tensor] = {}  # a gather sends the same part to all
    for box in [box for _, box in part.sends] + [part.kept]:
        if box not in copies:
            copies[box] = _copy(_view(array, box, part.before))
    parts = [Part(peer, copies[box]) for peer, box in part.sends]
    kept = copies[part.kept]
    del array
    holder.release()
    return parts, kept, True


def _exchange(holder: Holder, part: Routes) -> Iterator[Request]:
    """Exchanges parts; covers all_to_all, permute, exchange, direct, and gathers without a collective."""
    sends, kept, copied = _pack(holder, part)
    if all(_is_one_piece(part.after, box) for _, box in part.receives):
        out = kept.new_empty(_shape(part.after))
        _view(out, part.kept, part.after).copy_(kept)
        del kept
        yield Exchange(sends=sends, receives=[Part(peer, _view(out, box, part.after)) for peer, box in part.receives])
        sends.clear()
    else:
        pieces = [Part(peer, kept.new_empty(_shape(box))) for peer, box in part.receives]
        yield Exchange(sends=sends, receives=pieces)
        sends.clear()
        if not copied:
            kept = _copy(kept)
            holder.release()
        out = kept.new_empty(_shape(part.after))
        for (_, box), (_, piece) in zip(part.receives, pieces, strict=True):
            _view(out, box, part.after).copy_(piece)
        _view(out, part.kept, part.after).copy_(kept)
    holder.release()
    holder.array = out


def _packed(holder: Holder, part: Routes, boxes: list[Box]) -> torch.Tensor:
    """All of an array, flat, as boxes of equal size one behind the other: itself where they lie so, else a copy, and the array is
    freed."""
    array = holder.array
    if array.is_contiguous() and _are_in_order(part.before, boxes):
        return array.view(-1)
    packed = array.new_empty((len(boxes), *_shape(boxes[0])))
    for slot, box in zip(packed, boxes, strict=True):
        slot.copy_(_view(array, box, part.before))
    del array
    holder.release()
    return packed.view(-1)


def _all_to_all(holder: Holder, part: Routes, members: tuple[int, ...], rank: int) -> Iterator[Request]:
    """Every member sends a part to every other, in one call."""
    sends, receives = {**dict(part.sends), rank: part.kept}, {**dict(part.receives), rank: part.kept}
    boxes = [receives[member] for member in members]
    packed = _packed(holder, part, [sends[member] for member in members])
    sizes = [packed.numel() // len(members)] * len(members)
    in_order = _are_in_order(part.after, boxes)
    out = packed.new_empty(_shape(part.after) if in_order else (len(members), *_shape(boxes[0])))
    yield AllToAll(members=members, parts=packed, sizes=sizes, out=out.view(-1), out_sizes=sizes)
    _end(holder, packed)
    if not in_order:
        arrived, out = out, out.new_empty(_shape(part.after))
        for slot, box in zip(arrived, boxes, strict=True):
            _view(out, box, part.after).copy_(slot)
        _free(arrived)
    holder.array = out


def _end(holder: Holder, packed: torch.Tensor) -> None:
    """After a call: frees what was packed, and the array, where it is the same."""
    if packed.untyped_storage().data_ptr() != holder.array.untyped_storage().data_ptr():
        _free(packed)
    holder.release()


def _exchange_in_rounds(holder: Holder, part: Routes, rounds: int) -> Iterator[Request]:
    """The same through a staging buffer: every part is cut along its longest dim into as many pieces as there are rounds."""
    out = holder.array.new_empty(_shape(part.after))
    _view(out, part.kept, part.after).copy_(_view(holder.array, part.kept, part.before))
    for number in range(rounds):
        sends = [(peer, _cut(box, number, rounds)) for peer, box in part.sends]
        receives = [(peer, _cut(box, number, rounds)) for peer, box in part.receives]
        receives = [(peer, box) for peer, box in receives if box_numel(box)]
        pieces = [Part(peer, out.new_empty(_shape(box))) for peer, box in receives]
        yield Exchange(
            sends=[Part(peer, _view(holder.array, box, part.before).contiguous()) for peer, box in sends if box_numel(box)],
            receives=pieces,
        )
        for (_, box), (_, piece) in zip(receives, pieces, strict=True):
            _view(out, box, part.after).copy_(piece)
    holder.release()
    holder.array = out


def _reduce_scatter(holder: Holder, part: Routes, members: tuple[int, ...], rank: int) -> Iterator[Request]:
    """Adds each member's summand of this rank's part in the members' order, so that equal runs give equal bits."""
    sends, kept, _ = _pack(holder, part)
    summands = kept.new_empty((len(members), *_shape(part.after)))
    summands[members.index(rank)].copy_(kept)
    del kept
    givers = [member for member in members if member != rank and box_numel(part.after)]
    yield Exchange(sends=sends, receives=[Part(member, summands[members.index(member)]) for member in givers])
    sends.clear()
    holder.release()
    holder.array = torch.sum(summands, 0, dtype=summands.dtype)


def _reduce_scatter_together(
    holder: Holder, part: Routes, members: tuple[int, ...], rank: int, order: Order
) -> Iterator[Request]:
    """The same in one call, if all parts have one size."""
    boxes, numbered = {**dict(part.sends), rank: part.after}, order(members)
    packed = _packed(holder, part, [boxes[member] for member in numbered])
    sizes = [packed.numel() // len(members)] * len(members)
    summands = packed.new_empty((len(members), *_shape(part.after)))
    yield AllToAll(members=numbered, parts=packed, sizes=sizes, out=summands.view(-1), out_sizes=sizes)
    _end(holder, packed)
    holder.array = _summed(summands, numbered, members)


def _summed(summands: torch.Tensor, numbered: tuple[int, ...], members: tuple[int, ...]) -> torch.Tensor:
    """Adds in the members' order, so that replicas in other sub-groups have the same bits, however these are numbered."""
    in_order = summands if numbered == members else summands[[numbered.index(member) for member in members]]
    total = torch.sum(in_order, 0, dtype=summands.dtype)
    _free(summands)
    return total


def _reduce_scatter_in_rounds(
    holder: Holder, part: Routes, members: tuple[int, ...], rank: int, per_round: int
) -> Iterator[Request]:
    """The same where the summands of all members together are more than a tile (a dim shorter than the axis): in each round some
    members send, and every rank adds the summands it received."""
    parts = [Part(peer, _copy(_view(holder.array, box, part.before))) for peer, box in part.sends]
    total = _copy(_view(holder.array, part.kept, part.before))
    holder.release()
    for start in range(0, len(members), per_round):
        senders = members[start : start + per_round]
        givers = [member for member in senders if member != rank and total.numel()]
        summands = [Part(member, torch.empty_like(total)) for member in givers]
        yield Exchange(sends=parts if rank in senders else [], receives=summands)
        while summands:  # no variable may keep one alive into the next round
            total += summands.pop(0).piece
        if rank in senders:
            parts.clear()
    holder.array = total


def _native_reduce_scatter(holder: Holder, part: Routes, members: tuple[int, ...], rank: int) -> Iterator[Request]:
    boxes = {**dict(part.sends), rank: part.after}
    parts = holder.array.new_empty((len(members), *_shape(part.after)))
    for slot, member in zip(parts, members, strict=True):
        slot.copy_(_view(holder.array, boxes[member], part.before))
    holder.release()
    out = parts.new_empty(_shape(part.after))
    yield ReduceScatter(members=members, parts=parts, out=out)
    holder.array = out


def _native_all_gather(holder: Holder, part: Routes, members: tuple[int, ...]) -> Iterator[Request]:
    """Gathers in place where the parts are contiguous and in order."""
    array = _contiguous(holder)
    gathered = array.new_empty((len(members), *array.shape))
    yield Gather(members=members, local=array, out=gathered)
    del array
    holder.release()
    boxes = [dict(part.receives).get(member, part.kept) for member in members]
    if _are_in_order(part.after, boxes):
        holder.array = gathered.view(_shape(part.after))
        return
    out = gathered.new_empty(_shape(part.after))
    for slot, box in zip(gathered, boxes, strict=True):
        _view(out, box, part.after).copy_(slot)
    holder.array = out


def _native_all_reduce(holder: Holder, members: tuple[int, ...]) -> Iterator[Request]:
    total = _copy(holder.array)
    holder.release()
    yield AllReduce(members=members, total=total)
    holder.array = total


def _all_reduce(holder: Holder, members: tuple[int, ...], rank: int, order: Order) -> Iterator[Request]:
    """A reduce-scatter and a gather of the flat array, or, if it is small, a gather of all summands. All members add in the same
    order."""
    shape, numbered, n = holder.array.shape, order(members), len(members)
    me = numbered.index(rank)
    flat = _contiguous(holder).view(-1)
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
    _free(copies)
    holder.array = total.view(shape)


def _contiguous(holder: Holder) -> torch.Tensor:
    """The array as contiguous memory; if that takes a copy, the array is freed."""
    array = holder.array
    if array.is_contiguous():
        return array
    copied = _copy(array)
    del array
    holder.release()
    return copied


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _view(array: torch.Tensor, box: Box, inside: Box) -> torch.Tensor:
    """The view of the box in an array that holds the box `inside`."""
    index = tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(box, inside, strict=True))
    return array[index] if index else array


def _copy(array: torch.Tensor) -> torch.Tensor:
    return array.clone(memory_format=torch.contiguous_format)


def _is_one_piece(whole: Box, box: Box) -> bool:
    """Whether a part is contiguous in the contiguous array that holds `whole`."""
    split = False
    for (start, stop), (lo, hi) in zip(box, whole, strict=True):
        if split and (start, stop) != (lo, hi):
            return False
        split = split or stop - start > 1
    return True


def _are_in_order(whole: Box, boxes: list[Box]) -> bool:
    """Whether boxes of equal size that make up an array lie one behind the other in it."""
    return boxes == sorted(boxes) and all(_is_one_piece(whole, box) for box in boxes)


def _cut(box: Box, number: int, pieces: int) -> Box:
    longest = max(range(len(box)), key=lambda dim: box[dim][1] - box[dim][0])
    start, stop = box[longest]
    size = stop - start
    cut = (start + size * number // pieces, start + size * (number + 1) // pieces)
    return (*box[:longest], cut, *box[longest + 1 :])
