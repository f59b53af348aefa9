"""One rank's share of a step: which part it sends to whom, computed identically on every rank.

A route is a peer and a box in global indices. Where several ranks hold the same tile, a receiver that holds it serves itself; the
others are assigned round-robin to the holders with nothing to keep, so that the holders share the work. Between two ranks a step
has at most one route each way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from scrimp.layout import Box, Layout, box_numel, intersect
from scrimp.move.program import Program, Step

Route = tuple[int, Box]


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
    mesh = program.mesh
    holders: dict[Box, list[int]] = {}
    needers: dict[Box, list[int]] = {}
    for other in range(mesh.size):
        if all(mesh.coordinate(other, axis) == mesh.coordinate(rank, axis) for axis in step.before.partial):
            holders.setdefault(_tile(program, step.before, other), []).append(other)
            needers.setdefault(_tile(program, step.after, other), []).append(other)
    return _match(rank, _tile(program, step.before, rank), _tile(program, step.after, rank), holders, needers)


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
