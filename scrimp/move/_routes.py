"""Who sends which part to whom: one rank's share of a step, computed alike on every rank.

A route is a peer and a box in global indices. Where several ranks hold the same tile, a needer that holds it serves
itself; the others take their givers in turn among the holders with nothing to keep, so that as many holders as there
are share the work. Between two ranks a step has at most one route each way.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from scrimp.layout import Box, Layout, Mesh, box_numel, intersect
from scrimp.move._program import Program, Step

Route = tuple[int, Box]


@dataclass(frozen=True, kw_only=True)
class Routes:
    """What a rank sends, what it receives, and what it keeps (`kept` may be empty), besides its two tiles."""

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
    """For the steps in which parts change hands unsummed, and for reduce_scatter, where the giver's part is added."""
    before = _tile(program, step.before, rank)
    after = _tile(program, step.after, rank)
    if step.axes:
        members = [member for member in program.mesh.group(rank, step.axes) if member != rank]
        sends = [(member, intersect(before, _tile(program, step.after, member))) for member in members]
        receives = [(member, intersect(_tile(program, step.before, member), after)) for member in members]
    else:
        sends, receives = _matched(program, step, rank, before, after)
    return Routes(
        before=before,
        after=after,
        sends=_in_turn(sends, rank, program.mesh.size),
        receives=_in_turn(receives, rank, program.mesh.size),
        kept=intersect(before, after),
    )


def _in_turn(parts: list[Route], rank: int, world: int) -> tuple[Route, ...]:
    """Nearest peer upwards first, so that ranks do not all begin with the same one; empty parts are not sent."""
    return tuple(sorted((p for p in parts if box_numel(p[1])), key=lambda route: (route[0] - rank) % world))


def _matched(program: Program, step: Step, rank: int, before: Box, after: Box) -> tuple[list[Route], list[Route]]:
    mesh = program.mesh
    partial = step.before.partial
    domain = tuple(
        other
        for other in range(mesh.size)
        if all(mesh.coordinate(other, axis) == mesh.coordinate(rank, axis) for axis in partial)
    )
    holders, needers = _by_tile(step.before, mesh, domain), _by_tile(step.after, mesh, domain)
    mine, wanted = step.before.tile_index(mesh, rank), step.after.tile_index(mesh, rank)
    receives = []
    for tile in _overlapping(program, step.before, after):
        giver = _givers(holders[tile], needers[wanted], sum(wanted))[rank]
        if giver != rank:
            receives.append((giver, intersect(_tile(program, step.before, giver), after)))
    sends = []
    for tile in _overlapping(program, step.after, before):
        for needer, giver in _givers(holders[mine], needers[tile], sum(tile)).items():
            if giver == rank and needer != rank:
                sends.append((needer, intersect(before, _tile(program, step.after, needer))))
    return sends, receives


def _by_tile(layout: Layout, mesh: Mesh, ranks: tuple[int, ...]) -> dict[tuple[int, ...], list[int]]:
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        found.setdefault(layout.tile_index(mesh, rank), []).append(rank)
    return found


def _givers(holders: list[int], needers: list[int], turn: int) -> dict[int, int]:
    """For each needer of a part the holder that gives it."""
    both = {*holders} & {*needers}
    idle = [holder for holder in holders if holder not in both] or holders
    rest = [needer for needer in needers if needer not in both]
    givers = {rank: rank for rank in both}
    givers.update({needer: idle[(k + turn) % len(idle)] for k, needer in enumerate(rest)})
    return givers


def _overlapping(program: Program, layout: Layout, box: Box) -> list[tuple[int, ...]]:
    """The tiles of a layout that share something with a box."""
    ranges = []
    for (start, stop), size, whole, count in zip(
        box, program.shape, program.padded, layout.counts(program.mesh), strict=True
    ):
        chunk = -(-whole // count)
        if start >= stop or size == 0:
            return []
        ranges.append(range(start // chunk, (stop - 1) // chunk + 1))
    return list(itertools.product(*ranges))


def _tile(program: Program, layout: Layout, rank: int) -> Box:
    return layout.tile(program.shape, program.mesh, rank, program.padded)
