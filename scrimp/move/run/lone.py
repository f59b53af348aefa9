"""One rank of a mesh without the others: nothing is sent, and what arrives repeats what this rank has.

A rehearsal runs programs with it: every tensor that a run makes has the size that it has among real ranks. Tensors on meta have
no numbers, so nothing is copied there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from scrimp.layout import Mesh
from scrimp.move.program import Program
from scrimp.move.run.comm import Comm, Finish
from scrimp.move.run.execute import largest_overload
from scrimp.move.run.requests import AllReduce, AllToAll, Exchange, Gather, ReduceScatter, Request


class LoneComm(Comm):
    """`native`: gathers and sums are collectives of the backend, as they are on CUDA."""

    def __init__(self, mesh: Mesh, rank: int, *, native: bool) -> None:
        self.group = None
        self.ranks = self.peers = tuple(range(mesh.size))
        self.rank = rank
        self.native = native
        self.agreed: dict[str, int] = {}

    def overload(self, program: Program) -> int:
        """Of all ranks, which nobody else can say."""
        return largest_overload(program)

    def post(self, requests: Sequence[Request], tag: int = 0, *, ahead: bool = False) -> list[Finish]:
        """They are served when their run waits for them, and held until then."""
        return [partial(_serve, requests)]

    @contextmanager
    def having_agreed(self, program: Program) -> Iterator[None]:
        """Inside, the ranks have compared the program before. Outside, a first run compares it."""
        known = program.hash in self.agreed
        self.agreed.setdefault(program.hash, self.overload(program))
        yield
        if not known:
            del self.agreed[program.hash]

    def join_parts(self, device: torch.device) -> None:
        """Nobody else joins."""

    def every_row(self, words: list[int], device: torch.device) -> list[list[int]]:
        """Takes the memory that the agreement takes. With collectives of the backend it is an earlier step's."""
        if not self.native:
            mine = torch.tensor(words, dtype=torch.int64, device=device)
            mine.view(-1)  # a meter does not see how torch.tensor makes a tensor on meta
            torch.stack([torch.empty_like(mine) for _ in self.ranks])
        return [words for _ in self.ranks]


def _serve(requests: Sequence[Request]) -> None:
    for each in requests:
        match each:
            case Exchange():
                source = each.sends[0].piece if each.sends else None
                for _, piece in each.receives:
                    _fill(piece, source)
            case Gather():
                _fill(each.out, each.local)
            case ReduceScatter() | AllToAll():
                _fill(each.out, each.parts)
            case AllReduce():
                pass


def _fill(target: torch.Tensor, source: torch.Tensor | None) -> None:
    """Repeats the source, whose numbers are of the same kind: an index stays a valid index."""
    if target.is_meta:
        return
    if source is None or not source.numel():
        target.zero_()
        return
    flat, given = target.view(-1), source.reshape(-1)
    for start in range(0, flat.numel(), given.numel()):
        part = flat[start : start + given.numel()]
        part.copy_(given[: part.numel()])
