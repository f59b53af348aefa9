"""Ranks compare programs before they run them for the first time: a rank with another program, shape or dtype must cause an error
on every rank, not a hang on some."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from scrimp.errors import MoveError
from scrimp.move.program import Program
from scrimp.move.run.comm import Comm

SHAPE_SLOTS = 8
COLLECTIVES = ("reduce_scatter", "all_gather")  # of the backend, if all parts are equal
_DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})


def first_fault(programs: Sequence[Program], locals_: Sequence[torch.Tensor], rank: int) -> int | None:
    """The index of the first tensor that does not fit its program."""
    for index, (program, local) in enumerate(zip(programs, locals_, strict=True)):
        expected = program.src.local_shape(program.shape, program.mesh, rank)
        if tuple(local.shape) != expected or str(local.dtype) != f"torch.{program.dtype}":
            return index
    return None


def fault_text(program: Program, rank: int, shape: Sequence[int], dtype: str) -> str:
    expected = program.src.local_shape(program.shape, program.mesh, rank)
    return (
        f"mesh rank {rank} gave a tensor of shape {tuple(shape)} and dtype {dtype} to {program}, "
        f"which expects {expected} of torch.{program.dtype} there"
    )


def agree(comm: Comm, programs: Sequence[Program], locals_: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Compares programs and tensors over all ranks, once per list of programs; returns the largest overload of any rank, and a
    tag for messages that is the same on all ranks for the same programs."""
    rank = comm.rank
    bad = first_fault(programs, locals_, rank)
    key = programs[0].hash if len(programs) == 1 else hashlib.sha256("".join(p.hash for p in programs).encode()).hexdigest()
    if key in comm.agreed:
        if bad is not None:
            raise MoveError(fault_text(programs[bad], rank, locals_[bad].shape, str(locals_[bad].dtype)))
        return comm.agreed[key], int(key[:7], 16)
    shown = locals_[bad or 0]
    shape = [*shown.shape, *[-1] * SHAPE_SLOTS][:SHAPE_SLOTS]
    load = max(map(comm.overload, programs))
    words = [int(key[:15], 16), -1 if bad is None else bad, load, _DTYPES.index(str(shown.dtype)), shown.dim(), *shape]
    by_rank = compare(comm, words, shown.device, f"{programs[0]}{' and more' if len(programs) > 1 else ''}")
    for other, row in enumerate(by_rank):
        if row[1] >= 0:
            raise MoveError(fault_text(programs[row[1]], other, row[5 : 5 + min(row[4], SHAPE_SLOTS)], _DTYPES[row[3]]))
    if not comm.native_on(shown.device) or any(map(_has_parts, programs)):
        comm.join_parts(shown.device)
    comm.agreed[key] = max(row[2] for row in by_rank)
    return comm.agreed[key], int(key[:7], 16)


def _has_parts(program: Program) -> bool:
    """Whether ranks exchange parts, where gathers and sums are collectives of the backend."""
    uneven = program.padded != program.shape or 0 in program.shape
    return any(step.kind not in ("slice", "all_reduce") and (uneven or step.kind not in COLLECTIVES) for step in program.steps)


def compare(comm: Comm, words: list[int], device: torch.device, what: str) -> list[list[int]]:
    """The words of every mesh rank; an error on every rank unless the first word, a hash, is the same on all."""
    table = comm.every_row(words, device)
    by_rank = [table[peer] for peer in comm.peers]
    for other, row in enumerate(by_rank):
        if row[0] != words[0]:
            raise MoveError(
                f"mesh ranks {comm.rank} and {other} run different programs: hash {words[0]:015x} here, {row[0]:015x} "
                f"there; this rank's is {what}. Call with the same shape, layouts, mesh, dtype and cluster on every rank"
            )
    return by_rank
