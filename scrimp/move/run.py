"""Running a program on torch.distributed.

Memory: with the input donated, at most twice the larger tile, plus a stage of max(1 MiB, 1/8 of that tile); with the
input kept, that plus the input. A step packs what it sends, lets go of its input, receives, lets go of what it sent,
and unpacks: at no time more than two arrays of a tile's size. Parts that lie in one piece are sent and received in
place. Where one rank must send more than a tile (few holders, many needers), the exchange goes in rounds through the
stage instead.

Every rank of the mesh enters every step. Before a program's first run on a group the ranks compare its hash.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from scrimp.errors import MoveError
from scrimp.layout import Box, box_numel
from scrimp.move._comm import Comm, comm_for
from scrimp.move._program import Program, Step
from scrimp.move._routes import Routes, routes
from scrimp.move._torch_private import all_gather_flat, reduce_scatter_flat

STAGE_FLOOR_NBYTES = 1 << 20
STAGE_SHARE = 8


def run(program: Program, local: torch.Tensor, *, group: Any = None, donate: bool = False) -> torch.Tensor:
    """This rank's tile in the target layout. Group rank i is mesh rank i; `group` may be a DeviceMesh of the mesh's
    shape. A donated input loses its storage if it owns all of it. A program without steps returns its input."""
    comm = comm_for(program.mesh, group)
    rank = 0 if comm is None else comm.rank
    fault = _fault(program, local, rank)
    if comm is None or not program.steps:
        if fault:
            raise MoveError(fault)
        return local
    with torch.no_grad():
        try:
            exchanged = [step for step in program.steps if step.kind in ("exchange", "direct")]
            most = max((routes(program, step, rank).sent_numel for step in exchanged), default=0)
            most_sent = comm.agree(program, local, fault, most)
        except (RuntimeError, ValueError) as error:
            raise _failed(program, comm, "comparing the program over the ranks", error) from error
        holder = Holder(local, donate=donate)
        for number, step in enumerate(program.steps, start=1):
            try:
                _run_step(program, step, comm, holder, most_sent)
            except (RuntimeError, ValueError) as error:
                where = f"step {number} of {len(program.steps)} ({step.describe(program.mesh)})"
                raise _failed(program, comm, where, error) from error
        return holder.finish()


class Holder:
    """The array between steps. Only it refers to the array, so that `release` frees the memory at once."""

    def __init__(self, local: torch.Tensor, *, donate: bool) -> None:
        self.array = local
        self._input: torch.Tensor | None = local
        self._donate = donate

    def release(self) -> None:
        """Let go of the array: what is still needed of it has been packed."""
        self.array = self.array.new_empty(0)
        if self._input is not None and self._donate:
            storage = self._input.untyped_storage()
            if self._input.is_contiguous() and storage.nbytes() == self._input.numel() * self._input.element_size():
                storage.resize_(0)
        self._input = None

    def finish(self) -> torch.Tensor:
        """The result: contiguous, and sharing nothing with an input."""
        if self._input is None and self.array.is_contiguous():
            return self.array
        result = self.array.clone(memory_format=torch.contiguous_format)
        self.release()
        return result


def _fault(program: Program, local: torch.Tensor, rank: int) -> str | None:
    expected = program.src.local_shape(program.shape, program.mesh, rank)
    if tuple(local.shape) != expected or str(local.dtype) != f"torch.{program.dtype}":
        return (
            f"mesh rank {rank} gave a tensor of shape {tuple(local.shape)} and dtype {local.dtype} to {program}, "
            f"which expects {expected} of {program.dtype} there"
        )
    return None


def _failed(program: Program, comm: Comm, where: str, error: BaseException) -> MoveError:
    return MoveError(
        f"mesh rank {comm.rank} of {len(comm.ranks)} failed in {where} of {program}: {str(error).strip() or repr(error)}. "
        "A rank may have died, hung, or run another program; look at the ranks that did not report"
    )


def _run_step(program: Program, step: Step, comm: Comm, holder: Holder, most_sent: int) -> None:
    part = routes(program, step, comm.rank) if step.kind != "all_reduce" else None
    if step.kind == "slice" and part is not None:
        holder.array = _view(holder.array, part.after, part.before)
    elif step.kind == "all_reduce":
        _all_reduce(program, step, comm, holder)
    elif part is None:
        raise AssertionError(step.kind)
    elif step.kind == "reduce_scatter":
        _reduce_scatter(program, step, comm, holder, part)
    elif step.kind == "all_gather" and comm.native and program.padded == program.shape:
        _all_gather(program, step, comm, holder, part)
    elif step.kind in ("exchange", "direct") and most_sent > program.cap_numel:
        _exchange_in_rounds(program, comm, holder, part, most_sent)
    else:
        _exchange(comm, holder, part)


def _pack(holder: Holder, part: Routes) -> tuple[list[tuple[int, torch.Tensor]], torch.Tensor, bool]:
    """What is sent, what is kept, and whether both are copies: then the array has been let go of."""
    array = holder.array
    parts = [(peer, _view(array, box, part.before)) for peer, box in part.sends]
    kept = _view(array, part.kept, part.before)
    if array.is_contiguous() and all(_is_one_piece(part.before, box) for _, box in part.sends):
        return parts, kept, False
    parts = [(peer, piece.clone(memory_format=torch.contiguous_format)) for peer, piece in parts]
    kept = kept.clone(memory_format=torch.contiguous_format)
    del array
    holder.release()
    return parts, kept, True


def _exchange(comm: Comm, holder: Holder, part: Routes) -> None:
    """Parts change hands; covers all_to_all, permute, exchange, direct, and gathers without a collective."""
    sends, kept, copied = _pack(holder, part)
    if all(_is_one_piece(part.after, box) for _, box in part.receives):
        out = kept.new_empty(_shape(part.after))
        _view(out, part.kept, part.after).copy_(kept)
        del kept
        comm.exchange(sends, [(peer, _view(out, box, part.after)) for peer, box in part.receives])
        sends.clear()
    else:
        pieces = [(peer, kept.new_empty(_shape(box))) for peer, box in part.receives]
        comm.exchange(sends, pieces)
        sends.clear()
        if not copied:
            kept = kept.clone(memory_format=torch.contiguous_format)
            holder.release()
        out = kept.new_empty(_shape(part.after))
        for (_, box), (_, piece) in zip(part.receives, pieces, strict=True):
            _view(out, box, part.after).copy_(piece)
        _view(out, part.kept, part.after).copy_(kept)
    holder.release()
    holder.array = out


def _exchange_in_rounds(program: Program, comm: Comm, holder: Holder, part: Routes, most_sent: int) -> None:
    """The same through a stage: every part is cut into as many pieces along its longest dim as there are rounds."""
    array = holder.array
    out = array.new_empty(_shape(part.after))
    if box_numel(part.kept):
        _view(out, part.kept, part.after).copy_(_view(array, part.kept, part.before))
    stage = max(STAGE_FLOOR_NBYTES, program.cap_numel * program.itemsize // STAGE_SHARE)
    rounds = -(-(most_sent + program.cap_numel) * program.itemsize // stage)
    for number in range(rounds):
        sends = [(peer, _cut(box, number, rounds)) for peer, box in part.sends]
        receives = [(peer, _cut(box, number, rounds)) for peer, box in part.receives]
        pieces = [(peer, box, array.new_empty(_shape(box))) for peer, box in receives if box_numel(box)]
        comm.exchange(
            [(peer, _in_one_piece(array, box, part.before)) for peer, box in sends if box_numel(box)],
            [(peer, piece) for peer, _, piece in pieces],
        )
        for _, box, piece in pieces:
            _view(out, box, part.after).copy_(piece)
    del array
    holder.release()
    holder.array = out


def _reduce_scatter(program: Program, step: Step, comm: Comm, holder: Holder, part: Routes) -> None:
    """Each member's summand of my part, added in the members' order, so that equal runs give equal bits."""
    members = program.mesh.group(comm.rank, step.axes)
    if comm.native and program.padded == program.shape:
        group, order = comm.subgroup(members, holder.array.device)
        boxes = {**dict(part.sends), comm.rank: part.after}
        packed = holder.array.new_empty((len(members), *_shape(part.after)))
        for slot, member in zip(packed, order, strict=True):
            slot.copy_(_view(holder.array, boxes[member], part.before))
        holder.release()
        out = packed.new_empty(_shape(part.after))
        reduce_scatter_flat(_real(out).view(-1), _real(packed).view(-1), group)
        holder.array = out
        return
    sends, kept, _ = _pack(holder, part)
    summands = kept.new_empty((len(members), *_shape(part.after)))
    summands[members.index(comm.rank)].copy_(kept)
    del kept
    order = tuple(member for member in members if member != comm.rank and summands.numel())
    comm.exchange(sends, [(member, summands[members.index(member)]) for member in order])
    sends.clear()
    holder.release()
    holder.array = torch.sum(summands, 0, dtype=summands.dtype)


def _all_gather(program: Program, step: Step, comm: Comm, holder: Holder, part: Routes) -> None:
    """By the backend's collective, for equal tiles; lands in place where the parts lie in one piece and in order."""
    group, order = comm.subgroup(program.mesh.group(comm.rank, step.axes), holder.array.device)
    array = holder.array.contiguous()
    gathered = array.new_empty(len(order) * array.numel())
    all_gather_flat(_raw_view(gathered), _raw_view(array), group)
    tile = array.shape
    del array
    holder.release()
    boxes = {**dict(part.receives), comm.rank: part.kept}
    starts = [boxes[member] for member in order]
    if starts == sorted(starts) and all(_is_one_piece(part.after, box) for box in starts):
        holder.array = gathered.view(_shape(part.after))
        return
    out = gathered.new_empty(_shape(part.after))
    for slot, box in zip(gathered.view(len(order), *tile), starts, strict=True):
        _view(out, box, part.after).copy_(slot)
    holder.array = out


def _all_reduce(program: Program, step: Step, comm: Comm, holder: Holder) -> None:
    members = program.mesh.group(comm.rank, step.axes)
    array = holder.array.contiguous()
    if comm.native:
        group, _ = comm.subgroup(members, array.device)
        total = array.clone()
        del array
        holder.release()
        dist.all_reduce(_real(total), group=group)
        holder.array = total
        return
    # A reduce-scatter and a gather of the flat array, point to point; every member adds its part in the same order.
    shape, me, n = array.shape, members.index(comm.rank), len(members)
    flat = array.reshape(-1)
    bounds = [flat.numel() * k // n for k in range(n + 1)]
    parts = [flat[start:stop] for start, stop in zip(bounds, bounds[1:], strict=False)]
    summands = flat.new_empty((n, bounds[me + 1] - bounds[me]))
    summands[me].copy_(parts[me])
    others = [(k, member) for k, member in enumerate(members) if member != comm.rank]
    mine = summands.shape[1]
    comm.exchange(
        [(member, parts[k]) for k, member in others if parts[k].numel()],
        [(member, summands[k]) for k, member in others if mine],
    )
    del flat, parts, array
    holder.release()
    total = summands.new_empty(bounds[-1])
    torch.sum(summands, 0, dtype=summands.dtype, out=total[bounds[me] : bounds[me + 1]])
    del summands
    comm.exchange(
        [(member, total[bounds[me] : bounds[me + 1]]) for _, member in others if mine],
        [(member, total[bounds[k] : bounds[k + 1]]) for k, member in others if bounds[k + 1] > bounds[k]],
    )
    holder.array = total.view(shape)


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _view(array: torch.Tensor, box: Box, inside: Box) -> torch.Tensor:
    """The part of an array that holds box `inside`."""
    index = tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(box, inside, strict=True))
    return array[index] if index else array


def _in_one_piece(array: torch.Tensor, box: Box, inside: Box) -> torch.Tensor:
    """A part as a contiguous tensor: a view where it is one, else a copy."""
    return _view(array, box, inside).contiguous()


def _is_one_piece(whole: Box, box: Box) -> bool:
    """Whether a part lies in one piece of the contiguous array that holds `whole`."""
    split = False
    for (start, stop), (lo, hi) in zip(box, whole, strict=True):
        if split and (start, stop) != (lo, hi):
            return False
        split = split or stop - start > 1
    return True


def _cut(box: Box, number: int, pieces: int) -> Box:
    if not box:
        return box if number == 0 else ((0, 0),)
    longest = max(range(len(box)), key=lambda dim: box[dim][1] - box[dim][0])
    start, stop = box[longest]
    size = stop - start
    cut = (start + size * number // pieces, start + size * (number + 1) // pieces)
    return (*box[:longest], cut, *box[longest + 1 :])


def _real(array: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: backends add only real ones."""
    return torch.view_as_real(array) if array.is_complex() else array


def _raw_view(array: torch.Tensor) -> torch.Tensor:
    return array.reshape(-1).view(torch.uint8)
