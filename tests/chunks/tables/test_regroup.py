"""Windows and parts of a layer that another group of ranks will share: every element reaches its place, once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scrimp.chunks.tables.regroup import Grouping, content_numel, regrouped, windows
from scrimp.chunks.tables.shards import Shards
from scrimp.chunks.tables.table import Row, build_table

EVERYONE = 5
MEMBERS = st.sets(st.integers(0, EVERYONE - 1), min_size=1).map(sorted).map(tuple)
SIZES = st.lists(st.tuples(st.integers(1, 700), st.booleans()), min_size=1, max_size=4)


@given(st.lists(SIZES, min_size=1, max_size=3), MEMBERS, MEMBERS, st.integers(64, 1500))
def test_every_element_is_moved_once_to_its_place(
    sizes: list[list[tuple[int, bool]]], before: tuple[int, ...], after: tuple[int, ...], capacity: int
) -> None:
    """Each rank's arenas are filled with the layer's element numbers; after the moves they are as `Shards` has them."""
    layers = [
        (str(k), [Row(name=f"{k}.{n}", shape=(size,), trainable=trained) for n, (size, trained) in enumerate(rows)], [])
        for k, rows in enumerate(sizes)
    ]
    old, new = (build_table(layers, capacity=capacity, world=len(ranks)) for ranks in (before, after))
    assert regrouped(old, capacity=capacity, world=len(after)) == new
    having, wanted = Grouping(table=old, members=before), Grouping(table=new, members=after)
    for layer, space in enumerate(new.layers):
        arenas = {rank: [-1] * (space.numel // len(after)) for rank in after}
        for start, stop in windows(old, new, content_numel(space)):
            assert stop - start <= min(old.capacity, new.capacity)
            assert start % 64 == 0
            giver: dict[int, int] = {}
            for rank in range(EVERYONE):
                part = having.part(layer, rank, start, stop)
                giver |= dict(zip(_numbers(part.inside), _numbers(part.arena), strict=True))
                if part.arena.stop:
                    shards = Shards(table=old, world=len(before), rank=before.index(rank))
                    numbers = [start + at for at in _numbers(part.inside)]
                    assert _layer_elements(shards, layer)[part.arena] == numbers
            assert [*giver] == [*range(stop - start)]  # somebody has each element, and nobody has one twice
            for rank in after:
                part = wanted.part(layer, rank, start, stop)
                arenas[rank][part.arena] = [start + at for at in _numbers(part.inside)]
        for place, rank in enumerate(after):
            theirs = _layer_elements(Shards(table=new, world=len(after), rank=place), layer)
            there = content_numel(space)
            assert arenas[rank] == [at if at < there else -1 for at in theirs]


def _numbers(span: slice) -> list[int]:
    return [*range(span.start, span.stop)]


def _layer_elements(shards: Shards, layer: int) -> list[int]:
    """The numbers of a layer's elements in the order of a rank's arenas."""
    found: list[int] = []
    for start, stop in shards.table.chunks(layer):
        length = (stop - start) // shards.world
        found += range(start + shards.rank * length, start + (shards.rank + 1) * length)
    return found
