"""Several weights gathered in one move, and several gradients reduced in one: as one flat array of all their shares.

    shares    | a0 | b0 |    | a1 | b1 |            one row on each rank
    gathered  | a0 | b0 | a1 | b1 |                 every rank has all rows
    tiles     | a0 | a1 |    | b0 | b1 |            a copy each

Numbers are those of separate moves, bit for bit: a sum adds the same summands in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch

from scrimp.layout import Layout
from scrimp.lower.footprint import Pass
from scrimp.lower.moves import Communicator, local_shape, native_on
from scrimp.lower.weights.buckets import Buckets
from scrimp.lower.weights.rest import Rest
from scrimp.lower.weights.tiles import gathered, padded, summed
from scrimp.move import synthesize
from scrimp.planner import Placed


def gathered_together(comm: Communicator, shares: Sequence[torch.Tensor], of: Sequence[Rest]) -> list[torch.Tensor]:
    """Tiles as operators use them, from their shares over the same axes."""
    return [
        rows.reshape(-1)[: each.tile_numel(comm.mesh)].view(local_shape(each.use, comm.mesh))
        for rows, each in zip(shared_together(comm, shares, of[0].weight, ()), of, strict=True)
    ]


def shared_together(
    comm: Communicator, shares: Sequence[torch.Tensor], before: tuple[str, ...], after: tuple[str, ...]
) -> Iterable[torch.Tensor]:
    """Flat shares of several tiles over the axes `before`, as shares over the axes `after`, which come first among them. Each is
    a matrix with a row for each share, a view of the one array in which all of them arrive."""
    assert before[: len(after)] == after, (before, after)
    gone, flats = before[len(after) :], [share.view(-1) for share in shares]
    members = prod(map(comm.mesh.axis_size, gone))
    if native_on(comm, flats[0]):
        whole = _moved(comm, torch.cat(flats), (gone, ()), ((), ()))
    else:  # gloo's fastest collective is the all-to-all: a copy for each member goes there
        whole = _spread(comm, torch.cat(flats * members), gone)
    return torch.split(whole.view(members, -1), [flat.numel() for flat in flats], dim=1)


def summed_together(
    comm: Communicator,
    flats: list[torch.Tensor],
    before: tuple[tuple[str, ...], tuple[str, ...]],
    after: tuple[tuple[str, ...], tuple[str, ...]],
) -> list[torch.Tensor]:
    """Flat shares of several gradients from (axes that shard them, axes along which they are partial sums) to others. The former
    axes come first among the latter. Empties `flats`."""
    held, (over, later) = before[0], after
    assert over[: len(held)] == held, (before, after)
    rows = prod(map(comm.mesh.axis_size, over[len(held) :]))
    sizes = [flat.numel() // rows for flat in flats]
    packed = flats[0].new_empty((rows, sum(sizes)))
    for target in torch.split(packed, sizes, dim=1):
        target.copy_(flats.pop(0).view(rows, -1))
    flat = packed.view(-1)
    del packed, target
    found = _moved(comm, flat, ((), before[1]), (over[len(held) :], later)).view(1, -1)
    return [*torch.split(found, sizes, dim=1)]


def _spread(comm: Communicator, copies: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    """Part k of a flat array goes to member k along the axes."""
    mesh = comm.mesh
    others = tuple(axis for axis in mesh.names if axis not in axes)
    count, members = (prod(map(mesh.axis_size, each)) for each in (others, axes))
    src, dst = Layout(dims=(others, axes, ())), Layout(dims=(others, (), axes))
    dtype = str(copies.dtype).removeprefix("torch.")
    program = synthesize((count, members, copies.numel()), mesh, src, dst, dtype=dtype)
    return comm.move(program, copies.view(1, 1, -1), donate=True)


def _moved(
    comm: Communicator,
    flat: torch.Tensor,
    before: tuple[tuple[str, ...], tuple[str, ...]],
    after: tuple[tuple[str, ...], tuple[str, ...]],
) -> torch.Tensor:
    """One flat array from (axes that shard it, axes along which it is a partial sum) to others. Along all other axes of the mesh
    ranks hold arrays of their own."""
    mesh, used = comm.mesh, {*before[0], *before[1], *after[0], *after[1]}
    others = tuple(axis for axis in mesh.names if axis not in used)
    count, shards = (prod(map(mesh.axis_size, axes)) for axes in (others, before[0]))
    src, dst = (Layout(dims=(others, axes), partial=partial) for axes, partial in (before, after))
    program = synthesize((count, flat.numel() * shards), mesh, src, dst, dtype=str(flat.dtype).removeprefix("torch."))
    return comm.move(program, flat.view(1, -1), donate=True)


class Together:
    """Runs the gathers and reductions of the pass that runs, bucket by bucket. `share`: a weight's share at rest, flat."""

    def __init__(
        self,
        buckets: Buckets,
        rest: Mapping[str, Rest],
        comm: Communicator,
        later: Mapping[str, tuple[str, ...]],
        share: Callable[[str], torch.Tensor],
    ) -> None:
        self.buckets, self.rest, self.comm, self.later, self._share = buckets, rest, comm, later, share
        self._pass: Pass = (0, False)
        self._due = 0  # the number of the next gather, and of the next gradient
        self._made = 0
        self._brought: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, tuple[str, torch.Tensor]] = {}
        self._kept: dict[str, torch.Tensor] = {}  # from the last layer's forward for its backward

    def enter(self, layer: int, *, backward: bool) -> None:
        self._pass, self._due, self._made = (layer, backward), 0, 0
        self._brought.clear()
        self._waiting.clear()
        if not backward:
            self._kept.clear()

    @property
    def room_nbytes(self) -> int:
        """What may be held besides before the first step of the pass."""
        found = self.buckets.passes.get(self._pass)
        return found.room_nbytes if found is not None else 0

    def gather(self, name: str) -> torch.Tensor:
        """The next gather of the pass. Weights of its bucket that are due later are held until then."""
        number, found = self._due, self.buckets.passes.get(self._pass)
        self._due += 1
        if name in self._kept:
            return self._kept.pop(name)
        if number not in self._brought:
            self._bring(found.bring[number] if found is not None else (number,), name)
        tile = self._brought.pop(number)
        if found is not None and name in found.kept and not self._pass[1]:
            self._kept[name] = tile
        return tile

    def _bring(self, numbers: tuple[int, ...], name: str) -> None:
        found = self.buckets.passes.get(self._pass)
        if len(numbers) < 2 and (found is None or numbers[0] not in found.spread):
            self._brought[numbers[0]] = gathered(self.comm, self._share(name), self.rest[name], self.rest[name].weight)
            return
        names = [self.buckets.names[self._pass][each] for each in numbers]
        tiles = gathered_together(self.comm, [*map(self._share, names)], [self.rest[each] for each in names])
        self._brought.update(zip(numbers, tiles, strict=True))

    def sum(self, name: str, gradient: torch.Tensor, place: Placed, *, donate: bool) -> list[tuple[str, torch.Tensor]]:
        """Takes the next gradient of the pass. Returns the gradients that are summed now, as flat shares."""
        number, found = self._made, self.buckets.passes.get(self._pass)
        self._made += 1
        numbers = found.sum[number] if found is not None else (number,)
        each, later = self.rest[name], self.later.get(name, ())
        over = each.gradient if later else each.states
        if numbers == (number,):
            return [(name, summed(self.comm, gradient, place, each, over, later=later, donate=donate))]
        self._waiting[number] = name, padded(gradient, each, self.comm.mesh)
        del gradient
        if not numbers:
            return []
        names, flats = (list(part) for part in zip(*(self._waiting.pop(each) for each in numbers), strict=True))
        return [*zip(names, summed_together(self.comm, flats, ((), place.partial), (over, later)), strict=True)]
