"""The shard of every chunk that one rank holds.

The length of every chunk is a multiple of the world size, and rank r holds its r-th part. A rank's arenas of a layer hold its
parts of the layer's chunks end to end; those of masters and states stop after the last chunk with a trained parameter. Parts
begin at multiples of 64 elements of the layer, so that no vector lane of an update is ever cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from scrimp.chunks.tables.table import ChunkTable, Share, Slot


class Spans(NamedTuple):
    """A contiguous part of a parameter: in the parameter itself, and in the arenas of weights, gradients and states."""

    inside: slice
    weights: slice
    gradients: slice
    states: slice


@dataclass(frozen=True, kw_only=True)
class Shards:
    """One rank's shards of all layers."""

    table: ChunkTable
    world: int
    rank: int

    @cached_property
    def _spans(self) -> tuple[tuple[slice, ...], ...]:
        """For each layer and chunk this rank's part, in the layer's arenas."""
        layers = []
        for layer in range(len(self.table.layers)):
            spans, position = [], 0
            for start, stop in self.table.chunks(layer):
                length = (stop - start) // self.world
                spans.append(slice(position, position + length))
                position += length
            layers.append(tuple(spans))
        return tuple(layers)

    def of_rank(self, rank: int) -> Shards:
        return Shards(table=self.table, world=self.world, rank=rank)

    def numel(self, layer: int) -> int:
        return self.table.layers[layer].numel // self.world

    def trained_numel(self, layer: int) -> int:
        trained = self.table.layers[layer].trained
        if self.world == 1:
            return trained
        return sum((stop - start) // self.world for start, stop in self.table.chunks(layer) if start < trained)

    def summed_numel(self, layer: int) -> int:
        """Elements of an arena of gradients."""
        summed = self.table.layers[layer].summed
        return self.trained_numel(layer) if summed is None else summed

    def aligned(self, layer: int) -> bool:
        """Whether a part of a parameter is at the same place in all arenas."""
        return self.table.layers[layer].summed is None

    def chunks(self, layer: int) -> tuple[slice, ...]:
        return self._spans[layer]

    def pieces(self, layer: int, slot: Slot) -> tuple[Spans, ...]:
        """This rank's part of a slot, joined where it is contiguous."""
        key = layer, slot.start, slot.stop
        if key not in self._found:
            self._found[key] = (*self._pieces(layer, slot),)
        return self._found[key]

    @cached_property
    def _found(self) -> dict[tuple[int, int, int], tuple[Spans, ...]]:
        """Cache of `pieces`, which is called several times per step."""
        return {}

    def _pieces(self, layer: int, slot: Slot) -> Iterator[Spans]:
        if slot.share is not None:
            yield _shared(slot, slot.share)
            return
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
                yield _spans(*joined)
            joined = (inside, place, end - begin)
        if joined is not None:
            yield _spans(*joined)


def _spans(inside: int, place: int, length: int) -> Spans:
    span = slice(place, place + length)
    return Spans(slice(inside, inside + length), span, span, span)


def _shared(slot: Slot, share: Share) -> Spans:
    (start, stop), first = share.updated, share.summed[0]
    return Spans(
        slice(start, stop),
        slice(slot.start + start, slot.start + stop),
        slice(share.gradient_start + start - first, share.gradient_start + stop - first),
        slice(share.state_start, share.state_start + stop - start),
    )
