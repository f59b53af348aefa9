"""Runs programs on torch.distributed: one, or many in lockstep.

Memory of one run: with the input donated at most twice the larger tile plus a staging buffer of max(1 MiB, 1/8 of that tile);
with the input kept, that plus the input. Every rank of the mesh enters every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from scrimp.errors import MoveError
from scrimp.layout import Box, Mesh
from scrimp.move.plan.routes import routes_between
from scrimp.move.program import Program
from scrimp.move.run.agree import agree, compare, fault_text, first_fault
from scrimp.move.run.comm import Comm, comm_for
from scrimp.move.run.execute import execute, execute_between
from scrimp.move.run.holder import Holder
from scrimp.move.run.received import count_received
from scrimp.move.run.requests import Request

SPREAD = 0x9E3779B1  # odd, so that neighbouring turns have tags far apart
Where = tuple[Program, int] | None  # the program that runs, and which of its steps


def run_program(
    program: Program, local: torch.Tensor, *, group: Any = None, donate: bool = False, turn: int = 0, met: bool = False
) -> torch.Tensor:
    """This rank's tile in the target layout. Group rank i is mesh rank i; `group` may be a DeviceMesh of the mesh's
    shape. A donated input loses its storage if it owns all of it. A program without steps returns its input.

    `turn`: a number of this run among runs of the same program; ranks that run it under different numbers wait for each other
    until the time-out and do not mix up their tensors (not on NCCL, which has no tags). `met`: all ranks know that they run the
    same move now, so that gloo's all-to-all may serve it. It is faster than messages, but it has no tags, and ends the process
    if ranks disagree about sizes."""
    return run_in_step([program], [local], group=group, donate=[donate], turn=turn, met=met)[0]


def run_in_step(
    programs: Sequence[Program],
    locals_: Sequence[torch.Tensor],
    *,
    group: Any = None,
    donate: Sequence[bool] = (),
    turn: int = 0,
    met: bool = False,
) -> list[torch.Tensor]:
    """Runs programs on one mesh in lockstep: their concurrent requests are served in one call. `donate`: for each input whether
    it may lose its storage; empty: none may. `turn`, `met`: as in `run_program`."""
    comm = comm_for(programs[0].mesh, group)
    if comm is None or not any(program.steps for program in programs):
        rank = 0 if comm is None else comm.rank
        bad = first_fault(programs, locals_, rank)
        if bad is not None:
            raise MoveError(fault_text(programs[bad], rank, locals_[bad].shape, str(locals_[bad].dtype)))
        return list(locals_)
    with torch.no_grad():
        where: list[Where] = [None]
        try:
            locals_ = [local.resolve_conj().resolve_neg() for local in locals_]
            load, tag = agree(comm, programs, locals_)
            tag += turn * SPREAD
            given = donate or [False] * len(programs)
            holders = [Holder(local, donate=d and bool(p.steps)) for p, local, d in zip(programs, locals_, given, strict=True)]
            pending = [_steps(p, comm, h, load, where, met) for p, h in zip(programs, holders, strict=True)]
            while pending:
                pending = _serve_next(comm, pending, tag)
                tag += 1
            count_received(sum(program.received_nbytes for program in programs))
        except (RuntimeError, ValueError) as error:
            raise MoveError(
                f"mesh rank {comm.rank} of {len(comm.ranks)} failed in {_said(where[0])}: {str(error).strip() or repr(error)}. "
                "A rank may have died, hung, or run another program; check the ranks that did not report"
            ) from error
        return [
            holder.finish() if program.steps else local for program, holder, local in zip(programs, holders, locals_, strict=True)
        ]


def _serve_next(comm: Comm, pending: list[Iterator[Request]], tag: int) -> list[Iterator[Request]]:
    """Serves the next request of each run; returns the runs that had one. No request outlives this call: it would hold its
    tensors."""
    requests, asked = [], []
    for steps in pending:
        request = next(steps, None)
        if request is not None:
            requests.append(request)
            asked.append(steps)
    comm.serve(requests, tag)
    return asked


def _said(where: Where) -> str:
    if where is None:
        return "comparing the program over the ranks"
    program, number = where
    return f"step {number + 1} of {len(program.steps)} ({program.steps[number].describe(program.mesh)}) of {program}"


def _steps(program: Program, comm: Comm, holder: Holder, load: int, where: list[Where], met: bool) -> Iterator[Request]:
    native = comm.native_on(holder.array.device)
    for number, step in enumerate(program.steps):
        where[0] = program, number
        yield from execute(program, step, comm.rank, holder, order=comm.order, native=native, met=met, load=load)


def run_between(
    mesh: Mesh,
    before: Sequence[Box],
    after: Sequence[Box],
    local: torch.Tensor,
    *,
    sums: tuple[str, ...],
    key: str,
    group: Any = None,
) -> torch.Tensor:
    """Sums over the axes `sums`, then exchanges directly between given boxes of every rank, which need not be tiles of a layout.
    `key` is the same on all ranks exactly when they run the same move."""
    comm = comm_for(mesh, group)
    if comm is None:
        return local
    rank = comm.rank
    shape = tuple(stop - start for start, stop in before[rank])
    with torch.no_grad():
        try:
            local = local.resolve_conj().resolve_neg()
            tag = int(key[:7], 16)
            if key not in comm.agreed:
                what = f"a direct exchange on {mesh} from {before} to {after}"
                rows = compare(comm, [int(key[:15], 16), int(tuple(local.shape) == shape)], local.device, what)
                bad = [other for other, row in enumerate(rows) if not row[1]]
                if bad:
                    raise MoveError(f"mesh rank {bad[0]} gave a tensor that does not fit its box {before[bad[0]]}")
                comm.join_parts(local.device)
                comm.agreed[key] = 1
            elif tuple(local.shape) != shape:
                raise MoveError(f"mesh rank {rank} gave a tensor of shape {tuple(local.shape)} for its box {before[rank]}")
            holder = Holder(local, donate=False)
            pending = [execute_between(mesh, routes_between(before, after, rank), rank, holder, sums)]
            while pending:
                pending = _serve_next(comm, pending, tag)
                tag += 1
        except (RuntimeError, ValueError) as error:
            raise MoveError(f"mesh rank {rank} of {len(comm.ranks)} failed in a direct exchange on {mesh}: {error}") from error
        return holder.finish()
