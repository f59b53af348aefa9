"""Where one rank keeps its part of every chunk.

Chunk k of a layer has a length that the world divides; rank r keeps its r-th part. A rank's arena holds its parts of all
chunks of all layers end to end, and the arena of states its parts of the trained chunks. Borders of parts lie on
64-element borders of the layer, so that no vector lane of an update is ever cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from scrimp.chunks._table import ChunkTable, Slot


@dataclass(frozen=True, kw_only=True)
class Shards:
    table: ChunkTable
    world: int
    rank: int

    @cached_property
    def _spans(self) -> tuple[tuple[slice, ...], ...]:
        """For each layer and chunk this rank's part, in the arena."""
        layers, position = [], 0
        for layer in range(len(self.table.layers)):
            spans = []
            for start, stop in self.table.chunks(layer):
                length = (stop - start) // self.world
                spans.append(slice(position, position + length))
                position += length
            layers.append(tuple(spans))
        return tuple(layers)

    @cached_property
    def _trained_starts(self) -> tuple[int, ...]:
        """For each layer where its states begin; a layer has states for all chunks that hold something trained."""
        starts, position = [], 0
        for layer in range(len(self.table.layers)):
            starts.append(position)
            position += self._trained_length(layer)
        return (*starts, position)

    def of_rank(self, rank: int) -> Shards:
        return Shards(table=self.table, world=self.world, rank=rank)

    @property
    def numel(self) -> int:
        return self.table.numel // self.world

    @property
    def trained_numel(self) -> int:
        return self._trained_starts[-1]

    def _trained_length(self, layer: int) -> int:
        trained = self.table.layers[layer].trained
        if self.world == 1:
            return trained
        return sum((stop - start) // self.world for start, stop in self.table.chunks(layer) if start < trained)

    def chunks(self, layer: int) -> tuple[slice, ...]:
        return self._spans[layer]

    def trained_position(self, layer: int, shard: slice) -> int:
        """Where the states of a chunk's part begin."""
        first = self._spans[layer][0]
        return int(self._trained_starts[layer] + shard.start - first.start)

    def pieces(self, layer: int, slot: Slot) -> Iterator[tuple[slice, slice, slice]]:
        """What this rank has of a slot, as spans (in the parameter, in the arena, in the states), joined where they touch."""
        joined: tuple[int, int, int] | None = None  # start in the parameter, start in the arena, length
        for (start, stop), shard in zip(self.table.chunks(layer), self._spans[layer], strict=True):
            length = (stop - start) // self.world
            offset = start + self.rank * length
            begin, end = max(slot.start, offset), min(slot.stop, offset + length)
            if begin >= end:
                continue
            inside, place = begin - slot.start, shard.start + begin - offset
            if joined is not None and (joined[0] + joined[2], joined[1] + joined[2]) == (inside, place):
                joined = (joined[0], joined[1], joined[2] + end - begin)
                continue
            if joined is not None:
                yield self._spans_of(layer, joined)
            joined = (inside, place, end - begin)
        if joined is not None:
            yield self._spans_of(layer, joined)

    def _spans_of(self, layer: int, piece: tuple[int, int, int]) -> tuple[slice, slice, slice]:
        inside, place, length = piece
        trained = self._trained_starts[layer] + place - self._spans[layer][0].start
        return slice(inside, inside + length), slice(place, place + length), slice(trained, trained + length)
