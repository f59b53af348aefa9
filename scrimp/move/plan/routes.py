"""One rank's share of a step: which part it sends to whom, computed identically on every rank.

A route is a peer and a box in global indices. Where several ranks hold the same tile, a receiver that holds it serves itself; the
others are assigned round-robin to the holders with nothing to keep, so that the holders share the work. Between two ranks a step
has at most one route each way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from scrimp.layout import Box, Layout, Mesh, box_numel, intersect
from scrimp.move.program import Program, Step

Route = tuple[int, Box]

SMALL_NBYTES = 1 << 12  # of all members: so few bytes are sent to all, in one call


@dataclass(frozen=True, kw_only=True)
class Routes:
    """The parts that a rank sends, receives, and keeps (`kept` may be empty), and its two tiles."""

    before: Box
    after: Box
    sends: tuple[Route, ...]
    receives: tuple[Route, ...]
    kept: Box

    @property
    def sent_numel(self) -> int:
        return sum(box_numel(box) for _, box in self.sends)


@lru_cache(maxsize=4096)
def routes(program: Program, step: Step, rank: int) -> Routes:
    """For the steps that move parts without sums, and for reduce_scatter, where the received part is added."""
    before = _tile(program, step.before, rank)
    after = _tile(program, step.after, rank)
    if step.axes:
        members = [member for member in program.mesh.group(rank, step.axes) if member != rank]
        sends = [(member, intersect(before, _tile(program, step.after, member))) for member in members]
        receives = [(member, intersect(_tile(program, step.before, member), after)) for member in members]
    else:
        sends, receives = _matched(program, step, rank)
    return _routes(rank, program.mesh.size, before, after, sends, receives)


def busiest_numel(program: Program, step: Step) -> int:
    """Elements that the rank sends that sends most."""
    if step.axes:
        return max(routes(program, step, rank).sent_numel for rank in range(program.mesh.size))
    return max(sum(map(prod, shapes)) for shapes in _shapes_sent(program, step)[0].values())


def sizes_by_rank(program: Program) -> list[Hashable]:
    """What decides how much memory a run takes on each rank: ranks with equal values take the same."""
    mesh, even = program.mesh, program.padded == program.shape and 0 not in program.shape
    found: list[list[Hashable]] = [[] for _ in range(mesh.size)]
    for step in program.steps:
        if step.kind == "all_reduce":
            members = prod(mesh.axis_size(axis) for axis in step.axes)
            largest = step.before.local_numel(program.shape, mesh)
            if even and (largest % members == 0 or members * largest * program.itemsize <= SMALL_NBYTES):
                continue
            for rank, each in enumerate(found):
                numel = prod(stop - start for start, stop in _tile(program, step.before, rank))
                place = mesh.group(rank, step.axes).index(rank)
                each.append((numel, numel * (place + 1) // members - numel * place // members))
        elif not step.axes:
            sends, receives = _shapes_sent(program, step)
            for rank, each in enumerate(found):
                alike = _with_first_summand(program, step, rank)
                tiles = [_tile(program, layout, rank) for layout in (step.before, step.after)]
                kept = _shape(intersect(*tiles))
                each.append((*map(_shape, tiles), kept, *(tuple(sorted(of.get(alike, ()))) for of in (sends, receives))))
        elif not even:
            for rank, each in enumerate(found):
                part = routes(program, step, rank)
                peers = [tuple(sorted(_shape(box) for _, box in side)) for side in (part.sends, part.receives)]
                each.append((_shape(part.before), _shape(part.after), _shape(part.kept), *peers))
    return [*map(tuple, found)]


def _shapes_sent(program: Program, step: Step) -> tuple[dict[int, list[tuple[int, ...]]], dict[int, list[tuple[int, ...]]]]:
    """The shapes of all parts that ranks send, and receive, in a step without axes of its own: of one group of ranks with the
    same summand. The other groups are alike."""
    holders, needers = _holders(program, step, 0)
    held, needed = list(holders), list(needers)
    sizes: list[Any] = []  # by dim: of each box that is held in each box that is needed
    for dim in range(len(program.shape)):
        (low, high), (start, stop) = (np.array([box[dim] for box in boxes]).T for boxes in (held, needed))
        sizes.append(np.maximum(np.minimum(high[:, None], stop) - np.maximum(low[:, None], start), 0))
    shared = np.ones((len(held), len(needed)), dtype=bool)
    for each in sizes:
        shared &= each > 0
    sends: dict[int, list[tuple[int, ...]]] = {rank: [] for ranks in holders.values() for rank in ranks}
    receives: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in sends}
    for mine, turn in zip(*map(np.ndarray.tolist, np.nonzero(shared)), strict=True):
        shape = tuple(int(each[mine, turn]) for each in sizes)
        for needer, giver in _givers(holders[held[mine]], needers[needed[turn]], mine + turn).items():
            if giver != needer:
                sends[giver].append(shape)
                receives[needer].append(shape)
    return sends, receives


def _with_first_summand(program: Program, step: Step, rank: int) -> int:
    """The rank at the same place in the group of ranks that hold the first summand."""
    mesh, partial = program.mesh, {sub for axis in step.before.partial for sub in program.mesh.split(axis)}
    if not partial:
        return rank
    subs, ranks = _places(mesh)
    return ranks[tuple(0 if sub in partial else mesh.coordinate(rank, sub) for sub in subs)]


@lru_cache(maxsize=16)
def _places(mesh: Mesh) -> tuple[tuple[str, ...], dict[tuple[int, ...], int]]:
    """The prime sub-axes of a mesh, and the rank with given coordinates along them."""
    subs = tuple(sub for axis in mesh.names for sub in mesh.split(axis))
    return subs, {tuple(mesh.coordinate(rank, sub) for sub in subs): rank for rank in range(mesh.size)}


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def routes_between(before: Sequence[Box], after: Sequence[Box], rank: int) -> Routes:
    """The same for given boxes, one per rank, which need not be tiles of a layout."""
    holders: dict[Box, list[int]] = {}
    needers: dict[Box, list[int]] = {}
    for other in range(len(before)):
        holders.setdefault(before[other], []).append(other)
        needers.setdefault(after[other], []).append(other)
    sends, receives = _match(rank, before[rank], after[rank], holders, needers)
    return _routes(rank, len(before), before[rank], after[rank], sends, receives)


def _routes(rank: int, world: int, before: Box, after: Box, sends: Iterable[Route], receives: Iterable[Route]) -> Routes:
    def in_turn(parts: Iterable[Route]) -> tuple[Route, ...]:
        """Nearest peer upwards first, so that ranks do not all begin with the same one; empty parts are not sent."""
        return tuple(sorted((part for part in parts if box_numel(part[1])), key=lambda part: (part[0] - rank) % world))

    return Routes(before=before, after=after, sends=in_turn(sends), receives=in_turn(receives), kept=intersect(before, after))


def _matched(program: Program, step: Step, rank: int) -> tuple[list[Route], list[Route]]:
    """Within the ranks that hold the same summand, if the array is a partial sum."""
    holders, needers = _holders(program, step, rank)
    return _match(rank, _tile(program, step.before, rank), _tile(program, step.after, rank), holders, needers)


def _holders(program: Program, step: Step, rank: int) -> tuple[dict[Box, list[int]], dict[Box, list[int]]]:
    """The ranks with the same summand as this one, by the box that they hold, and by the box that they need."""
    mesh = program.mesh
    holders: dict[Box, list[int]] = {}
    needers: dict[Box, list[int]] = {}
    for other in range(mesh.size):
        if all(mesh.coordinate(other, axis) == mesh.coordinate(rank, axis) for axis in step.before.partial):
            holders.setdefault(_tile(program, step.before, other), []).append(other)
            needers.setdefault(_tile(program, step.after, other), []).append(other)
    return holders, needers


def _match(
    rank: int, before: Box, after: Box, holders: dict[Box, list[int]], needers: dict[Box, list[int]]
) -> tuple[list[Route], list[Route]]:
    held, needed = list(holders), list(needers)
    mine, wanted = held.index(before), needed.index(after)
    receives, sends = [], []
    for turn, box in enumerate(held):
        shared = intersect(box, after)
        if box_numel(shared):
            giver = _givers(holders[box], needers[after], turn + wanted)[rank]
            if giver != rank:
                receives.append((giver, shared))
    for turn, box in enumerate(needed):
        shared = intersect(before, box)
        if box_numel(shared):
            givers = _givers(holders[before], needers[box], mine + turn)
            sends += [(needer, shared) for needer, giver in givers.items() if giver == rank != needer]
    return sends, receives


def _givers(holders: list[int], needers: list[int], turn: int) -> dict[int, int]:
    """For each receiver of a part its sender; `turn` differs between parts, so that holders take turns."""
    both = {*holders} & {*needers}
    idle = [holder for holder in holders if holder not in both] or holders
    rest = [needer for needer in needers if needer not in both]
    givers = {rank: rank for rank in both}
    givers.update({needer: idle[(k + turn) % len(idle)] for k, needer in enumerate(rest)})
    return givers


def _tile(program: Program, layout: Layout, rank: int) -> Box:
    return layout.tile(program.shape, program.mesh, rank, program.padded)
