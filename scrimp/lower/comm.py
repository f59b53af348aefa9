"""How a lowered program communicates: moves between placements, and sums and maxima inside operators.

`Ranks` runs on torch.distributed. A rehearsal, or a simulation, gives another object with the same methods.
"""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

import torch

from scrimp.errors import RunError
from scrimp.layout import Layout, Mesh
from scrimp.move import Program, run_program, synthesize


class Communicator(Protocol):
    mesh: Mesh
    rank: int

    def move(self, program: Program, local: torch.Tensor, *, donate: bool) -> torch.Tensor: ...

    def all_reduce(self, tensor: torch.Tensor, how: str, axes: tuple[str, ...]) -> torch.Tensor:
        """`how`: "sum" or "max"."""
        ...


class Ranks:
    def __init__(self, mesh: Mesh, rank: int, group: Any = None) -> None:
        self.mesh, self.rank, self.group = mesh, rank, group

    def move(self, program: Program, local: torch.Tensor, *, donate: bool) -> torch.Tensor:
        return run_program(program, local, group=self.group, donate=donate)

    def all_reduce(self, tensor: torch.Tensor, how: str, axes: tuple[str, ...]) -> torch.Tensor:
        return all_reduce(self, tensor, how, axes)

    def agree(self, digest: str, device: torch.device | str = "cpu") -> None:
        """Raises `RunError` on every rank if one of them has lowered other steps: before the first step, not as a hang in it."""
        mine = torch.tensor([int(digest[:15], 16)], device=device)
        program = synthesize((self.mesh.size,), self.mesh, Layout(dims=(self.mesh.names,)), Layout(dims=((),)), dtype="int64")
        found = self.move(program, mine, donate=False).tolist()
        others = [rank for rank, each in enumerate(found) if each != found[0]]
        if others:
            raise RunError(
                f"ranks {', '.join(map(str, others))} run other steps than rank 0: give all ranks the same plan, model and scrimp"
            )


def all_reduce(comm: Communicator, tensor: torch.Tensor, how: str, axes: tuple[str, ...]) -> torch.Tensor:
    """By moves: a sum is a move from partial sums; for a maximum everyone gathers everyone's numbers. Along the other axes the
    numbers may differ: they are tiles there."""
    mesh, dtype = comm.mesh, str(tensor.dtype).removeprefix("torch.")
    others = tuple(axis for axis in mesh.names if axis not in axes)
    members, rest = (prod(map(mesh.axis_size, names)) for names in (axes, others))
    if how == "sum":
        src, dst = Layout(dims=(others, ()), partial=axes), Layout(dims=(others, ()))
        program = synthesize((rest, tensor.numel()), mesh, src, dst, dtype=dtype)
        return comm.move(program, tensor.reshape(1, -1), donate=False).view(tensor.shape)
    src, dst = Layout(dims=(others, axes, ())), Layout(dims=(others, (), ()))
    program = synthesize((rest, members, tensor.numel()), mesh, src, dst, dtype=dtype)
    return comm.move(program, tensor.reshape(1, 1, -1), donate=False).amax(1).view(tensor.shape)
