"""The problem of a device with one model chunk or several, and many micro-batches: joins the sketches of its chunks.

Its points come from scenes (`pipeline/schedule.py`): one chunk runs forward or backward while a given number of micro-batches of
each chunk is in flight. Every scene that no other dominates contributes all points of the chunk's forward or backward; a forward
and a backward with the same micro-batches in flight share one scene. Seconds of a micro-batch count once for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scrimp.planner.formulation.builder import AWAY, FLIGHT, ONCE, Numbers, Sketch
from scrimp.planner.pipeline.schedule import Scene

Key = tuple[int, int, str]


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The points of a scene in the joined problem: `begin` is the position of the chunk's point `first`."""

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
    """The joined problem. `starts`: the first node of each chunk."""

    sketch: Sketch
    starts: tuple[int, ...]
    stretches: tuple[Stretch, ...]

    def choices(self, choice: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Splits a choice into those of the chunks."""
        for start, stop in zip(self.starts, (*self.starts[1:], len(choice)), strict=True):
            yield tuple(choice[start:stop])

    def local(self, point: int) -> tuple[int, int]:
        """The chunk that runs at a point of the joined problem, and the point within that chunk."""
        for stretch in self.stretches:
            if stretch.begin <= point <= stretch.end:
                return stretch.piece, stretch.first + point - stretch.begin
        raise LookupError(point)


def joined(pieces: Sequence[Sketch], turns: Sequence[int], scenes: Sequence[Scene], micro_batches: int) -> Joined:
    """`turns`: the first backward point of each chunk."""
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
            for span, times in spans_of((first, last), p, stretches):
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
        for span, times in spans_of((first, last), piece, stretches):
            whole[*span, kind] = whole.get((*span, kind), 0) + times * nbytes


def spans_of(span: tuple[int, int], piece: int, stretches: list[Stretch]) -> Iterator[tuple[tuple[int, int], int]]:
    """The spans in the joined problem in which something of a chunk is held, and how often."""
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
