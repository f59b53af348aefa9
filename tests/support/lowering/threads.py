"""All ranks of a mesh as threads of one process: moves by the definition of layouts, apart from their executor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from scrimp.layout import Mesh
from scrimp.lower import Arrived
from scrimp.lower.moves import all_reduce
from scrimp.move import Program

Made = TypeVar("Made")


class Board:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.barrier = threading.Barrier(mesh.size, timeout=60)
        self.given: list[Any] = [None] * mesh.size


class OnItsWay(Arrived):
    """Holds what it sends, as a backend does."""

    def __init__(self, made: torch.Tensor, local: torch.Tensor) -> None:
        super().__init__(made)
        self._local: torch.Tensor | None = local

    def wait(self) -> torch.Tensor:
        self._local = None
        return super().wait()


class ThreadRank:
    """Every member checks that all run the same program, and that replicas are equal."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.mesh, self.rank = board, board.mesh, rank
        self.moves = 0

    def move(self, program: Program, local: torch.Tensor, *, donate: bool) -> torch.Tensor:
        if not program.steps:
            return local
        self.moves += 1
        board = self.board
        board.given[self.rank] = (program, local)
        board.barrier.wait()
        with _disable_current_modes():
            made = self._made(program)
        board.barrier.wait()
        board.given[self.rank] = None
        return torch.ops.aten.alias(made)  # so that a meter sees it

    def _made(self, program: Program) -> torch.Tensor:
        first = self.board.given[0][1]
        whole = torch.zeros(program.shape, dtype=first.dtype, device=first.device)
        used = {axis for dim in program.src.dims for axis in dim} | {*program.src.partial}
        for rank, (other, local) in enumerate(self.board.given):
            assert other == program, f"rank {self.rank} runs {program}, rank {rank} {other}"
            box = tuple(slice(start, stop) for start, stop in program.src.tile(program.shape, self.mesh, rank))
            assert local.shape == whole[box].shape, (program, local.shape, rank)
            replica = [self.mesh.coordinate(rank, axis) for axis in self.mesh.names if axis not in used]
            if not any(replica):
                whole[box] += local
            else:
                first = {axis: self.mesh.coordinate(rank, axis) if axis in used else 0 for axis in self.mesh.names}
                base = next(r for r in range(self.mesh.size) if all(self.mesh.coordinate(r, a) == k for a, k in first.items()))
                assert torch.equal(local, self.board.given[base][1]), f"replicas differ before {program}"
        box = tuple(slice(start, stop) for start, stop in program.dst.tile(program.shape, self.mesh, self.rank))
        if any(self.mesh.coordinate(self.rank, axis) for axis in program.dst.partial):
            return torch.zeros_like(whole[box])  # the first along these axes has the sum
        return whole[box].clone()

    def start(self, program: Program, local: torch.Tensor, *, donate: bool) -> Arrived:
        return OnItsWay(self.move(program, local, donate=donate), local)

    def all_reduce(self, tensor: torch.Tensor, how: str, axes: tuple[str, ...]) -> torch.Tensor:
        return all_reduce(self, tensor, how, axes)


def on_threads(mesh: Mesh, job: Callable[[ThreadRank], Made]) -> list[Made]:
    """What each rank's job returns. The first error of any rank is raised."""
    board, made, errors = Board(mesh), [None] * mesh.size, []

    def run(rank: int) -> None:
        try:
            made[rank] = job(ThreadRank(board, rank))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            board.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return made  # type: ignore[return-value]
