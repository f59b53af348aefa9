"""Implements `Tiling` by a plan's placements: parameters whole on one side, shares of their tiles on the other.

Under pipeline stages a parameter comes from the first stage that holds it: its ranks gather it, and the others receive it.
"""

from __future__ import annotations

from math import prod

import torch

from scrimp.engine.lowered.program import Program
from scrimp.lower import Communicator, Rest, flat_tile, gathered, made_whole, part_of
from scrimp.move import Peers

Box = tuple[tuple[int, int, int], ...]


class PlannedTiling:
    """`comm`: of the ranks of this stage. `peers`: all ranks, where there are several stages."""

    def __init__(self, program: Program, comm: Communicator, peers: Peers | None) -> None:
        self.program, self.comm, self.peers = program, comm, peers

    def shape(self, name: str) -> tuple[int, ...]:
        return self.program.rest(name).shape

    def cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        each, mesh, rank = self.program.part.rest.get(name), self.comm.mesh, self.comm.rank
        if each is None:
            return whole.new_empty(0)
        start, stop = each.span(each.weight, mesh, rank)
        return flat_tile(whole, each, mesh, rank).view(-1)[start:stop]

    def tile(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        """The tile in use, from the part that each rank updates: a collective where ranks share a tile."""
        each = self.program.rest(name)
        return gathered(self.comm, mine, each, self._over(each))

    def whole(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        each, first = self.program.rest(name), self.program.holders[name]
        if first == self.program.stage:
            found = made_whole(self.comm, self.tile(name, mine), each.use).contiguous()
        else:
            found = mine.new_empty(each.shape)
        if self.peers is not None:
            self.peers.spread(found, first)
        return found

    def counts(self, name: str) -> bool:
        first = self.program.holders[name] == self.program.stage
        return first and self._first(self.program.rest(name), self.comm.rank)

    def extent(self, name: str, rank: int) -> tuple[Box, int, int] | None:
        each, mesh = self.program.rest(name), self.comm.mesh
        stage, rank = divmod(rank, mesh.size)
        if stage != self.program.holders[name] or not self._first(each, rank):
            return None
        start, stop = each.span(self._over(each), mesh, rank)
        most = each.tile_numel(mesh)
        return self._box(each, rank), min(start, most), min(stop, most)

    def label(self, name: str, rank: int) -> str:
        each = self.program.rest(name)
        box, (start, stop) = self._box(each, rank), each.span(self._over(each), self.comm.mesh, rank)
        if all(length == size for size, _, length in box) and (start, stop) == (0, prod(each.shape)):
            return ""
        return "@" + "*".join(f"{first}+{length}of{size}" for size, first, length in box) + f"[{start}:{stop}]"

    def _box(self, each: Rest, rank: int) -> Box:
        factors = (factor for dim in each.use.dims for factor in dim)
        return tuple((size, *part_of(size, axes, self.comm.mesh, rank)) for size, axes in factors)

    def _over(self, each: Rest) -> tuple[str, ...]:
        """The axes over which what a rank updates is sharded. A frozen weight has no states; its share of the weight counts."""
        return each.states if each.trained else each.weight

    def _first(self, each: Rest, rank: int) -> bool:
        sharded = {*each.use.axes, *self._over(each)}
        mesh = self.comm.mesh
        return all(mesh.coordinate(rank, axis) == 0 for axis in mesh.names if axis not in sharded)
