"""The same layers sharded over another group of ranks: which elements each rank has before, and which it has afterwards.

Slots begin at the same elements whatever the number of ranks. Only the padding at a layer's end and the length of a chunk depend
on it, because a chunk is a multiple of 64 elements a rank. So a layer is cut at the ends of the chunks of both tables. Within
such a window every rank has at most one contiguous part before, and one afterwards. Data moves window by window, and no window is
longer than a chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from scrimp.chunks.tables.table import ALIGN, ChunkTable, LayerSpace


class Part(NamedTuple):
    """What a rank has of a window: its elements, counted from the window's start, and where they are in the rank's arenas."""

    inside: slice
    arena: slice


NOTHING = Part(slice(0, 0), slice(0, 0))


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """A chunk table, and the ranks that share its chunks in equal parts, in order. Ranks are numbers in a larger group."""

    table: ChunkTable
    members: tuple[int, ...]

    def part(self, layer: int, rank: int, start: int, stop: int) -> Part:
        """A rank's part of elements [start, stop) of a layer, which lie in one chunk."""
        if rank not in self.members:
            return NOTHING
        capacity, numel = self.table.capacity, self.table.layers[layer].numel
        first = start // capacity * capacity  # of the chunk
        length = (min(first + capacity, numel) - first) // len(self.members)
        mine = first + self.members.index(rank) * length
        begin, end = max(start, mine), min(stop, mine + length)
        if begin >= end:
            return NOTHING
        place = first // len(self.members) + begin - mine  # all earlier chunks of the layer are full
        return Part(slice(begin - start, end - start), slice(place, place + end - begin))


def regrouped(table: ChunkTable, *, capacity: int, world: int) -> ChunkTable:
    """The table of the same layers for another number of ranks, as `build_table` makes it."""
    grain = ALIGN * world
    layers = tuple(replace(layer, numel=-(-content_numel(layer) // grain) * grain) for layer in table.layers)
    return ChunkTable(layers=layers, capacity=max(grain, capacity // grain * grain)).check()


def content_numel(layer: LayerSpace) -> int:
    """Elements up to the end of the last slot, with its alignment; the rest of the layer is padding for the ranks."""
    return max((-(-slot.stop // ALIGN) * ALIGN for slot in layer.slots), default=0)


def windows(old: ChunkTable, new: ChunkTable, numel: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of the windows of a layer's first `numel` elements: each lies in one chunk of either table."""
    ends = {*range(0, numel, old.capacity), *range(0, numel, new.capacity), numel}
    yield from itertools.pairwise(sorted(ends))
