"""Executes the steps of a program on one rank's array.

Memory: a step packs what it sends, frees its input, receives, frees what it sent, and unpacks, so that no more than two arrays of
a tile's size are live at a time. Contiguous parts are sent and received in place. Where some rank must send more than a tile (few
holders, many receivers), the exchange goes in rounds through a staging buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from scrimp.layout import Box, Mesh, box_numel
from scrimp.move.plan.routes import SMALL_NBYTES, Routes, busiest_numel, routes
from scrimp.move.program import Program, Step
from scrimp.move.run import all_to_all
from scrimp.move.run.all_to_all import Order
from scrimp.move.run.holder import Holder, contiguous, copy_of, is_one_piece, shape_of, view_of
from scrimp.move.run.requests import AllReduce, Exchange, Gather, Part, ReduceScatter, Request

STAGE_FLOOR_NBYTES = 1 << 20
STAGE_SHARE = 8


def stage_nbytes(tile_nbytes: int) -> int:
    """Bytes that a run may hold beyond two tiles of the larger size."""
    return max(STAGE_FLOOR_NBYTES, tile_nbytes // STAGE_SHARE)


def overload(program: Program, rank: int) -> int:
    """The most tiles' worth that this rank sends in a step with arbitrary exchanges, rounded up."""
    loose = [step for step in program.steps if step.kind in ("exchange", "direct")]
    most = max((routes(program, step, rank).sent_numel for step in loose), default=0)
    return -(-most // max(program.cap_numel, 1))


def largest_overload(program: Program) -> int:
    """The same of the rank that sends most."""
    loose = [step for step in program.steps if step.kind in ("exchange", "direct")]
    most = max((busiest_numel(program, step) for step in loose), default=0)
    return -(-most // max(program.cap_numel, 1))


def execute(
    program: Program, step: Step, rank: int, holder: Holder, *, order: Order, native: bool, met: bool, load: int
) -> Iterator[Request]:
    """Runs one step. `order`: mesh ranks as their sub-group numbers them. If `native`, gathers and sums are collectives of the
    backend. If `met`, exchanges in which every member sends to every other are. `load` is the largest overload of any rank."""
    members = program.mesh.group(rank, step.axes)
    if step.kind == "all_reduce" and 0 in program.shape:
        return
    if step.kind == "all_reduce":
        if native:
            yield from _native_all_reduce(holder, order(members))
        else:
            yield from all_to_all.all_reduce(holder, members, rank, order) if met else _all_reduce(holder, members, rank)
        return
    part = routes(program, step, rank)
    even = program.padded == program.shape and 0 not in program.shape
    native = native and even  # collectives of the backend need equal, non-empty parts
    met = met and even
    if step.kind == "slice":
        holder.array = view_of(holder.array, part.after, part.before)
    elif step.kind == "reduce_scatter" and native:
        yield from _native_reduce_scatter(holder, part, order(members), rank)
    elif step.kind == "reduce_scatter":
        largest = step.after.local_numel(program.shape, program.mesh, program.padded)
        per_round = max(1, program.cap_numel // max(largest, 1))
        if per_round < len(members):
            yield from _reduce_scatter_in_rounds(holder, part, members, rank, per_round)
        elif met:
            yield from all_to_all.reduce_scatter(holder, part, members, rank, order)
        else:
            yield from _reduce_scatter(holder, part, members, rank)
    elif step.kind == "all_gather" and native:
        yield from _native_all_gather(holder, part, order(members))
    elif step.kind == "all_gather" and met and len(members) * holder.array.nbytes <= SMALL_NBYTES:
        yield from all_to_all.small_all_gather(holder, part, order(members))
    elif step.kind == "all_to_all" and met:
        yield from all_to_all.all_to_all(holder, part, order(members), rank)
    elif step.kind in ("exchange", "direct") and load > 1:
        nbytes = (load + 1) * program.cap_numel * program.itemsize
        yield from _exchange_in_rounds(holder, part, -(-nbytes // stage_nbytes(program.cap_numel * program.itemsize)))
    else:
        yield from _exchange(holder, part)


def execute_between(mesh: Mesh, part: Routes, rank: int, holder: Holder, sums: tuple[str, ...]) -> Iterator[Request]:
    """Sums over axes, then a direct exchange along given routes."""
    if sums:
        yield from _all_reduce(holder, mesh.group(rank, sums), rank)
    yield from _exchange(holder, part)


def _pack(holder: Holder, part: Routes) -> tuple[list[Part], torch.Tensor, bool]:
    """The parts to send, the part to keep, and whether both are copies: then the array has been freed."""
    array = holder.array
    parts = [Part(peer, view_of(array, box, part.before)) for peer, box in part.sends]
    kept = view_of(array, part.kept, part.before)
    if array.is_contiguous() and all(is_one_piece(part.before, box) for _, box in part.sends):
        return parts, kept, False
    copies: dict[Box, torch.Tensor] = {}  # a gather sends the same part to all
    for box in [box for _, box in part.sends] + [part.kept]:
        if box not in copies:
            copies[box] = copy_of(view_of(array, box, part.before))
    parts = [Part(peer, copies[box]) for peer, box in part.sends]
    kept = copies[part.kept]
    del array
    holder.release()
    return parts, kept, True


def _exchange(holder: Holder, part: Routes) -> Iterator[Request]:
    """Exchanges parts; covers all_to_all, permute, exchange, direct, and gathers without a collective."""
    sends, kept, copied = _pack(holder, part)
    if all(is_one_piece(part.after, box) for _, box in part.receives):
        out = kept.new_empty(shape_of(part.after))
        view_of(out, part.kept, part.after).copy_(kept)
        del kept
        yield Exchange(sends=sends, receives=[Part(peer, view_of(out, box, part.after)) for peer, box in part.receives])
        sends.clear()
    else:
        pieces = [Part(peer, kept.new_empty(shape_of(box))) for peer, box in part.receives]
        yield Exchange(sends=sends, receives=pieces)
        sends.clear()
        if not copied:
            kept = copy_of(kept)
            holder.release()
        out = kept.new_empty(shape_of(part.after))
        for (_, box), (_, piece) in zip(part.receives, pieces, strict=True):
            view_of(out, box, part.after).copy_(piece)
        view_of(out, part.kept, part.after).copy_(kept)
    holder.release()
    holder.array = out


def _exchange_in_rounds(holder: Holder, part: Routes, rounds: int) -> Iterator[Request]:
    """The same through a staging buffer: every part is cut along its longest dim into as many pieces as there are rounds."""
    out = holder.array.new_empty(shape_of(part.after))
    view_of(out, part.kept, part.after).copy_(view_of(holder.array, part.kept, part.before))
    for number in range(rounds):
        sends = [(peer, _cut(box, number, rounds)) for peer, box in part.sends]
        receives = [(peer, _cut(box, number, rounds)) for peer, box in part.receives]
        receives = [(peer, box) for peer, box in receives if box_numel(box)]
        pieces = [Part(peer, out.new_empty(shape_of(box))) for peer, box in receives]
        yield Exchange(
            sends=[Part(peer, view_of(holder.array, box, part.before).contiguous()) for peer, box in sends if box_numel(box)],
            receives=pieces,
        )
        for (_, box), (_, piece) in zip(receives, pieces, strict=True):
            view_of(out, box, part.after).copy_(piece)
    holder.release()
    holder.array = out


def _reduce_scatter(holder: Holder, part: Routes, members: tuple[int, ...], rank: int) -> Iterator[Request]:
    """Adds each member's summand of this rank's part in the members' order, so that equal runs give equal bits."""
    sends, kept, _ = _pack(holder, part)
    summands = kept.new_empty((len(members), *shape_of(part.after)))
    summands[members.index(rank)].copy_(kept)
    del kept
    givers = [member for member in members if member != rank and box_numel(part.after)]
    yield Exchange(sends=sends, receives=[Part(member, summands[members.index(member)]) for member in givers])
    sends.clear()
    holder.release()
    holder.array = torch.sum(summands, 0, dtype=summands.dtype)


def _reduce_scatter_in_rounds(
    holder: Holder, part: Routes, members: tuple[int, ...], rank: int, per_round: int
) -> Iterator[Request]:
    """The same where the summands of all members together are more than a tile (a dim shorter than the axis): in each round some
    members send, and every rank adds the summands it received."""
    parts = [Part(peer, copy_of(view_of(holder.array, box, part.before))) for peer, box in part.sends]
    total = copy_of(view_of(holder.array, part.kept, part.before))
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
    parts = holder.array.new_empty((len(members), *shape_of(part.after)))
    for slot, member in zip(parts, members, strict=True):
        slot.copy_(view_of(holder.array, boxes[member], part.before))
    holder.release()
    out = parts.new_empty(shape_of(part.after))
    yield ReduceScatter(members=members, parts=parts, out=out)
    holder.array = out


def _native_all_gather(holder: Holder, part: Routes, members: tuple[int, ...]) -> Iterator[Request]:
    """Gathers in place where the parts are contiguous and in order."""
    array = contiguous(holder)
    gathered = array.new_empty((len(members), *array.shape))
    yield Gather(members=members, local=array, out=gathered)
    del array
    holder.release()
    holder.array = all_to_all.placed(gathered, part, members)


def _native_all_reduce(holder: Holder, members: tuple[int, ...]) -> Iterator[Request]:
    total = copy_of(holder.array)
    holder.release()
    yield AllReduce(members=members, total=total)
    holder.array = total


def _cut(box: Box, number: int, pieces: int) -> Box:
    longest = max(range(len(box)), key=lambda dim: box[dim][1] - box[dim][0])
    start, stop = box[longest]
    size = stop - start
    cut = (start + size * number // pieces, start + size * (number + 1) // pieces)
    return (*box[:longest], cut, *box[longest + 1 :])


def _all_reduce(holder: Holder, members: tuple[int, ...], rank: int) -> Iterator[Request]:
    """A reduce-scatter and a gather of the flat array; every member adds its part in the same order."""
    shape, me, n = holder.array.shape, members.index(rank), len(members)
    flat = contiguous(holder).view(-1)
    if n * flat.nbytes <= SMALL_NBYTES:  # every member sends all to all others, and adds
        each = flat.new_empty((n, flat.numel()))
        each[me].copy_(flat)
        yield Exchange(
            sends=[Part(members[k], flat) for k in range(n) if k != me and flat.numel()],
            receives=[Part(members[k], each[k]) for k in range(n) if k != me and flat.numel()],
        )
        del flat
        holder.release()
        holder.array = torch.sum(each, 0, dtype=each.dtype).view(shape)
        return
    bounds = [flat.numel() * k // n for k in range(n + 1)]
    spans = [slice(start, stop) for start, stop in itertools.pairwise(bounds)]
    filled = [k for k in range(n) if bounds[k + 1] > bounds[k]]
    others = [k for k in range(n) if k != me]
    summands = flat.new_empty((n, bounds[me + 1] - bounds[me]))
    summands[me].copy_(flat[spans[me]])
    yield Exchange(
        sends=[Part(members[k], flat[spans[k]]) for k in others if k in filled],
        receives=[Part(members[k], summands[k]) for k in others if me in filled],
    )
    del flat
    holder.release()
    total = summands.new_empty(bounds[-1])
    torch.sum(summands, 0, dtype=summands.dtype, out=total[spans[me]])
    del summands
    yield Exchange(
        sends=[Part(members[k], total[spans[me]]) for k in others if me in filled],
        receives=[Part(members[k], total[spans[k]]) for k in others if k in filled],
    )
    holder.array = total.view(shape)
