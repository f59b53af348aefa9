"""Runs programs on torch.distributed: one, or many in lockstep.

Memory of one run: with the input donated at most twice the larger tile plus a staging buffer of max(1 MiB, 1/8 of that tile);
with the input kept, that plus the input. Every rank of the mesh enters every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from scrimp.errors import MoveError
from scrimp.layout import Box, Mesh
from scrimp.move.plan.routes import routes_between
from scrimp.move.program import Program
from scrimp.move.run.agree import agree, compare, fault_text, first_fault
from scrimp.move.run.comm import Comm, Finish, comm_for
from scrimp.move.run.execute import execute, execute_between
from scrimp.move.run.holder import Holder
from scrimp.move.run.received import count_received
from scrimp.move.run.requests import Request

SPREAD = 0x9E3779B1  # odd, so that neighbouring turns have tags far apart


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


def start_program(program: Program, local: torch.Tensor, *, group: Any = None, donate: bool = False, turn: int = 0) -> Started:
    """The same, of a move that has met: its first step is on its way, `wait` runs the rest. Ranks start and wait in one order."""
    started = Started([program], [local], group=group, donate=[donate], turn=turn, met=True, ahead=True)
    started.post()
    return started


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
    return Started(programs, locals_, group=group, donate=donate, turn=turn, met=met).wait()


class Started:
    """Programs that run in lockstep. `post` puts the next request of each on its way; `wait` runs all to their ends. It holds all
    that the requests use until they are served. `ahead`: other work runs between the two."""

    def __init__(
        self,
        programs: Sequence[Program],
        locals_: Sequence[torch.Tensor],
        *,
        group: Any,
        donate: Sequence[bool],
        turn: int,
        met: bool,
        ahead: bool = False,
    ) -> None:
        self._comm, self._where, self._ahead = comm_for(programs[0].mesh, group), Where(), ahead
        self._pending: list[Iterator[Request]] = []
        self._posted: list[Finish] = []
        self._results: list[Callable[[], torch.Tensor]] = []
        self._received_nbytes = 0
        if self._comm is None or not any(program.steps for program in programs):
            rank = 0 if self._comm is None else self._comm.rank
            bad = first_fault(programs, locals_, rank)
            if bad is not None:
                raise MoveError(fault_text(programs[bad], rank, locals_[bad].shape, str(locals_[bad].dtype)))
            self._results = [partial(_same, local) for local in locals_]
            return
        with torch.no_grad(), self._where.named(self._comm):
            locals_ = [local.resolve_conj().resolve_neg() for local in locals_]
            load, self._tag = agree(self._comm, programs, locals_)
            self._received_nbytes = sum(program.received_nbytes for program in programs)
            self._tag += turn * SPREAD
            for program, local, given in zip(programs, locals_, donate or [False] * len(programs), strict=True):
                holder = Holder(local, donate=given and bool(program.steps))
                self._pending.append(_steps(program, self._comm, holder, load, self._where, met))
                self._results.append(holder.finish if program.steps else partial(_same, local))

    def post(self) -> None:
        """Of each run that goes on. No request outlives its serving: it would hold its tensors."""
        assert self._comm is not None
        assert not self._posted
        with torch.no_grad(), self._where.named(self._comm):
            requests, asked = [], []
            for steps in self._pending:
                request = next(steps, None)
                if request is not None:
                    requests.append(request)
                    asked.append(steps)
            self._posted, self._pending = self._comm.post(requests, self._tag, ahead=self._ahead), asked
            self._tag += 1

    def wait(self) -> list[torch.Tensor]:
        if self._comm is not None:
            while self._pending or self._posted:
                with torch.no_grad(), self._where.named(self._comm):
                    while self._posted:
                        self._posted[0]()
                        del self._posted[0]
                if self._pending:
                    self.post()
            count_received(self._received_nbytes)
        with torch.no_grad():
            return [result() for result in self._results]


def _same(local: torch.Tensor) -> torch.Tensor:
    return local


class Where:
    """The program that runs, and which of its steps."""

    def __init__(self) -> None:
        self.program: Program | None = None
        self.number = 0

    @contextmanager
    def named(self, comm: Comm) -> Iterator[None]:
        """Inside, what the backend raises becomes an error that tells where."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise MoveError(
                f"mesh rank {comm.rank} of {len(comm.ranks)} failed in {self}: {str(error).strip() or repr(error)}. "
                "A rank may have died, hung, or run another program; check the ranks that did not report"
            ) from error

    def __str__(self) -> str:
        if self.program is None:
            return "comparing the program over the ranks"
        step = self.program.steps[self.number].describe(self.program.mesh)
        return f"step {self.number + 1} of {len(self.program.steps)} ({step}) of {self.program}"


def _steps(program: Program, comm: Comm, holder: Holder, load: int, where: Where, met: bool) -> Iterator[Request]:
    native = comm.native_on(holder.array.device)
    for number, step in enumerate(program.steps):
        where.program, where.number = program, number
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
            for request in execute_between(mesh, routes_between(before, after, rank), rank, holder, sums):
                for finish in comm.post([request], tag):
                    finish()
                del request, finish  # they hold tensors
                tag += 1
        except (RuntimeError, ValueError) as error:
            raise MoveError(f"mesh rank {rank} of {len(comm.ranks)} failed in a direct exchange on {mesh}: {error}") from error
        return holder.finish()
