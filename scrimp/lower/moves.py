"""How a lowered program communicates: a tensor from one placement to another, and sums and maxima inside operators.

`Ranks` runs on torch.distributed. A rehearsal, or a simulation, gives another object with the same methods.

A move sees the local tensor in memory order and with its dims as factors, so that it keeps the order in which dims lie in memory:
an attention kernel's result follows its query, and a view that was free would become a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Protocol

import torch

from scrimp.errors import RunError
from scrimp.layout import Layout, Mesh
from scrimp.move import Program, Started, run_program, start_program, synthesize
from scrimp.planner import Placed, between, common, unsplit

MOST_MET = 1 << 16  # moves of a step that are remembered; evaluations never repeat theirs


class Handle(Protocol):
    """A move on its way."""

    def wait(self) -> torch.Tensor: ...


class Arrived:
    """A move that has ended."""

    def __init__(self, made: torch.Tensor) -> None:
        self._made = made

    def wait(self) -> torch.Tensor:
        return self._made


class Communicator(Protocol):
    mesh: Mesh
    rank: int

    def move(self, program: Program, local: torch.Tensor, *, donate: bool) -> torch.Tensor: ...

    def start(self, program: Program, local: torch.Tensor, *, donate: bool) -> Handle:
        """The same, while other work runs. All ranks start their moves in one order, and wait for them in one order."""
        ...

    def all_reduce(self, tensor: torch.Tensor, how: str, axes: tuple[str, ...]) -> torch.Tensor:
        """`how`: "sum" or "max"."""
        ...


Start = Callable[[Program, torch.Tensor, bool], Handle]  # a program, this rank's tile, and whether it may be freed


def at_once(comm: Communicator) -> Start:
    return lambda program, local, donate: Arrived(comm.move(program, local, donate=donate))


def behind(comm: Communicator) -> Start:
    return lambda program, local, donate: comm.start(program, local, donate=donate)


class UnderWay:
    def __init__(self, started: Started) -> None:
        self._started = started

    def wait(self) -> torch.Tensor:
        return self._started.wait()[0]


class Ranks:
    """`turn`: a number that follows from everything that this rank has communicated, in order, since it was set. Messages carry
    it, so that a rank that leaves out or reorders a move meets no other move, not even one of the same program.

    A move that has gone well once under its number has met the same move on all other ranks. When it comes again, in a later
    step, it may use calls of the backend that carry no number: a rank that has gone astray has another one, sends messages, and
    meets nobody."""

    turn: int = 0
    native: bool | None = None  # whether gathers and sums are collectives of the backend; None: as the tensor's device says

    def __init__(self, mesh: Mesh, rank: int, group: Any = None) -> None:
        self.mesh, self.rank, self.group = mesh, rank, group
        self._met: set[tuple[int, str]] = set()

    def start(self, program: Program, local: torch.Tensor, *, donate: bool) -> Handle:
        """A move that has not met yet ends here: one that meets no other fails at once, not behind others."""
        if not program.steps or not self.has_met((self._after(1), program.hash)):
            return Arrived(self.move(program, local, donate=donate))
        self.note(1)
        return self.under_way(program, local, donate=donate)

    def under_way(self, program: Program, local: torch.Tensor, *, donate: bool) -> Handle:
        return UnderWay(start_program(program, local, group=self.group, donate=donate, turn=self.turn))

    def move(self, program: Program, local: torch.Tensor, *, donate: bool) -> torch.Tensor:
        if not program.steps:
            return run_program(program, local, group=self.group, donate=donate)
        self.note(1)
        key = (self.turn, program.hash)
        met = self.has_met(key)
        made = run_program(program, local, group=self.group, donate=donate, turn=self.turn, met=met)
        if not met:
            if len(self._met) >= MOST_MET:  # on all ranks at the same move
                self._met.clear()
            self._met.add(key)
        return made

    def has_met(self, key: tuple[int, str]) -> bool:
        """Whether this move, the turn and the program's hash, has met the same move on all ranks before."""
        return key in self._met

    def note(self, what: int) -> None:
        """Before a move: what it is for."""
        self.turn = self._after(what)

    def _after(self, what: int) -> int:
        return (self.turn * 1_000_003 + what) % (1 << 61)

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


def native_on(comm: Communicator, tensor: torch.Tensor) -> bool:
    """Whether a gather is one collective of the backend. A rehearsal says it, whose tensors are on another device."""
    said: bool | None = getattr(comm, "native", None)
    return tensor.is_cuda if said is None else said


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


def local_shape(place: Placed, mesh: Mesh) -> tuple[int, ...]:
    return tuple(
        prod(size for size, _ in dim) // prod(mesh.axis_size(axis) for _, axes in dim for axis in axes) for dim in place.dims
    )


def redistribute(
    comm: Communicator, local: torch.Tensor, before: Placed, after: Placed, order: Sequence[int] = (), *, donate: bool
) -> torch.Tensor:
    if order:
        back = sorted(range(len(order)), key=order.__getitem__)
        moved = redistribute(comm, local.permute(*order), before.permuted(order), after.permuted(order), donate=donate)
        return moved.permute(*back)
    for program, tile, shape in _programs(before, after, comm.mesh, comm.rank, local.dtype):
        made = comm.move(program, local.reshape(tile), donate=donate)
        local, donate = made.reshape(shape), True
    return local


def made_whole(comm: Communicator, local: torch.Tensor, before: Placed) -> torch.Tensor:
    """All of a tensor on every rank: itself where that is so."""
    whole = unsplit(before.shape)
    return local if before == whole else redistribute(comm, local, before, whole, donate=False)


def hops(before: Placed, after: Placed, mesh: Mesh) -> tuple[tuple[tuple[int, ...], Layout, Layout, Placed], ...]:
    """One hop, or two over a placement that shares factors with both ends."""
    found = common(before, after, mesh)
    if found is not None:
        return ((*found, after),)
    middle = between(before, after, mesh)
    return (*hops(before, middle, mesh), *hops(middle, after, mesh))


@lru_cache(maxsize=1 << 14)
def _programs(
    before: Placed, after: Placed, mesh: Mesh, rank: int, dtype: torch.dtype
) -> tuple[tuple[Program, tuple[int, ...], tuple[int, ...]], ...]:
    """Of each hop the program, the tile that it takes, and the local shape of its result."""
    found = []
    for shape, src, dst, place in hops(before, after, mesh):
        program = synthesize(shape, mesh, src, dst, dtype=str(dtype).removeprefix("torch."))
        found.append((program, src.local_shape(shape, mesh, rank), local_shape(place, mesh)))
    return tuple(found)
