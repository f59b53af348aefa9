"""The problem of a device that has one piece of a model or several, and many micro-batches: sketches of pieces, put together.

Its moments are scenes (`pipeline/schedule.py`): a piece runs forward or backward, and so and so many micro-batches of each piece
are in flight. All points of the piece's forward, or backward, are there once for each scene that no other makes needless;
forward and backward of the same flights are one scene. Seconds of micro-batches count as often as there are micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scrimp.planner.build.builder import AWAY, FLIGHT, ONCE, Numbers, Sketch
from scrimp.planner.pipeline.schedule import Scene

Key = tuple[int, int, str]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A scene's points in the whole: `begin` is that of the piece's point `first`."""

    piece: int
    flights: tuple[int, ...]
    begin: int
    first: int
    last: int

    @property
    def end(self) -> int:
        return self.begin + self.last - self.first


@dataclass(frozen=True, kw_only=True)
class Joined:
    """`starts`: the first node of each piece."""

    sketch: Sketch
    starts: tuple[int, ...]
    stretches: tuple[Stretch, ...]

    def choices(self, choice: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Of each piece its part."""
        for start, stop in zip(self.starts, (*self.starts[1:], len(choice)), strict=True):
            yield tuple(choice[start:stop])

    def local(self, point: int) -> tuple[int, int]:
        """The piece that runs at a point of the whole, and which of its points that is."""
        for stretch in self.stretches:
            if stretch.begin <= point <= stretch.end:
                return stretch.piece, stretch.first + point - stretch.begin
        raise LookupError(point)


def joined(pieces: Sequence[Sketch], turns: Sequence[int], scenes: Sequence[Scene], micro_batches: int) -> Joined:
    """`turns`: of each piece the first point of its backward."""
    stretches = [*_stretches(pieces, turns, scenes)]
    whole = Sketch([pieces[each.piece].where[k] for each in stretches for k in range(each.first, each.last + 1)])
    starts = []
    for p, piece in enumerate(pieces):
        start = len(whole.nodes)
        starts.append(start)
        for node in piece.nodes:
            made = whole.node(node.name, node.options)
            _spend(whole.nodes[made].spent, node.spent, micro_batches)
            _place(whole.nodes[made].holds, node.holds, p, stretches)
        for (one, two), edge in piece.edges.items():
            link = whole.edge(start + one, start + two)
            _spend(link.spent, edge.spent, micro_batches)
            _place(link.holds, edge.holds, p, stretches)
        for first, last, kind, nbytes in piece.once:
            for span, times in _spans((first, last), p, stretches):
                whole.must_be(*span, kind, times * nbytes)
    return Joined(sketch=whole, starts=tuple(starts), stretches=tuple(stretches))


def _stretches(pieces: Sequence[Sketch], turns: Sequence[int], scenes: Sequence[Scene]) -> Iterator[Stretch]:
    directions: dict[tuple[int, tuple[int, ...]], set[bool]] = {}
    for scene in scenes:
        directions.setdefault((scene.piece, scene.flights), set()).add(scene.backward)
    begin = 0
    for (piece, flights), found in directions.items():
        first = 0 if False in found else turns[piece]
        last = pieces[piece].points - 1 if True in found else turns[piece] - 1
        yield Stretch(piece=piece, flights=flights, begin=begin, first=first, last=last)
        begin += last - first + 1


def _spend(whole: dict[str, Numbers], spent: Mapping[str, Numbers], micro_batches: int) -> None:
    for when, seconds in spent.items():
        whole[when] = seconds if when == ONCE else micro_batches * seconds


def _place(whole: dict[Key, Numbers], holds: Mapping[Key, Numbers], piece: int, stretches: list[Stretch]) -> None:
    for (first, last, kind), nbytes in holds.items():
        for span, times in _spans((first, last), piece, stretches):
            whole[*span, kind] = whole.get((*span, kind), 0) + times * nbytes


def _spans(span: tuple[int, int], piece: int, stretches: list[Stretch]) -> Iterator[tuple[tuple[int, int], int]]:
    """Where in the whole something of a piece is held, and how many of it."""
    for stretch in stretches:
        runs = stretch.piece == piece
        if span == FLIGHT:
            times = stretch.flights[piece] - runs
            if times:
                yield (stretch.begin, stretch.end), times
        elif span == AWAY:
            if not runs:
                yield (stretch.begin, stretch.end), 1
        elif runs:
            first, last = max(span[0], stretch.first), min(span[1], stretch.last)
            if first <= last:
                yield (stretch.begin + first - stretch.first, stretch.begin + last - stretch.first), 1
