"""The model's data: flat arenas on the host, and one flat storage per layer on the device that comes and goes.

A layer's device storage is one object for ever: it is emptied and filled again, so that parameters, and views of them
that autograd saved, stay valid. On the device a gradient takes the place of its weight, which nobody needs any more in
this step. On the host every layer has a slot of weights in compute precision, and fp32 master and optimizer states for
what is trained. In bf16 the gradient takes the weight's slot there too (14 bytes per parameter), unless micro-batches
are accumulated; in fp32 the weight is its own master and the gradient has an arena of its own (16).

With several ranks each chunk is cut into equal shards, and a rank's arenas hold its shards alone: a fetch gathers, and
retiring a layer's gradients reduces and scatters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from scrimp.chunks._shards import Shards
from scrimp.chunks._table import ChunkTable, Slot
from scrimp.chunks._wire import Wire
from scrimp.ledger import Ledger

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(kw_only=True)
class Traffic:
    """Bytes moved between host and device, by direction."""

    up_nbytes: int = 0
    down_nbytes: int = 0


class Store:
    def __init__(
        self,
        table: ChunkTable,
        *,
        precision: str,
        device: torch.device,
        states: int,
        accumulate: int,
        ledger: Ledger,
        wire: Wire,
    ) -> None:
        self.table = table
        self.precision = precision
        self.dtype = DTYPES[precision]
        self.device = device
        self.ledger = ledger
        self.wire = wire
        self.traffic = Traffic()
        self.own_master = precision == "fp32"
        self.shards = Shards(table=table, world=wire.world, rank=wire.rank)
        trained = self.shards.trained_numel
        self.weights = torch.empty(self.shards.numel, dtype=self.dtype)
        self.master = self.weights if self.own_master else torch.empty(trained, dtype=torch.float32)
        self.states = [torch.zeros(trained, dtype=torch.float32) for _ in range(states)]
        separate = self.own_master or accumulate > 1
        self.gradients = torch.empty(trained, dtype=self.dtype) if separate else None
        self.flats = [torch.empty(layer.numel, dtype=self.dtype, device=device) for layer in table.layers]
        for flat in self.flats:
            flat.untyped_storage().resize_(0)
        self.resident = [False] * len(table.layers)

    @property
    def arenas(self) -> Iterator[torch.Tensor]:
        yield self.weights
        if not self.own_master:
            yield self.master
        yield from self.states
        if self.gradients is not None:
            yield self.gradients

    def host_nbytes(self) -> int:
        return sum(arena.nbytes for arena in self.arenas)

    def nbytes(self, layer: int) -> int:
        return self.table.layers[layer].numel * self.dtype.itemsize

    # A slot's pieces on this rank, on the host: (where in the parameter, weight, master, states, gradient).

    def pieces(self, layer: int, slot: Slot) -> Iterator[Piece]:
        for inside, span, trained in self.shards.pieces(layer, slot):
            weight = self.weights[span]
            yield Piece(
                inside=inside,
                weight=weight,
                master=weight if self.own_master else self.master[trained],
                states=[state[trained] for state in self.states],
                gradient=weight if self.gradients is None else self.gradients[trained],
            )

    def adopt(self, layer: int, slot: Slot, values: torch.Tensor) -> None:
        """Take a parameter's values over."""
        source = values.detach().reshape(-1)
        for piece in self.pieces(layer, slot):
            piece.weight.copy_(source[piece.inside])
            if slot.trainable and not self.own_master:
                piece.master.copy_(source[piece.inside])

    def restore(self, layer: int, slot: Slot) -> None:
        """After a skipped update: the weight again, where its gradient stood."""
        if self.gradients is None:
            for piece in self.pieces(layer, slot):
                piece.weight.copy_(piece.master)

    def device_view(self, layer: int, slot: Slot) -> torch.Tensor:
        return self.flats[layer].as_strided(slot.shape, _strides(slot.shape), slot.start)

    # Moving layers.

    def open(self, layer: int) -> None:
        """Room for a layer on the device, with nothing in it."""
        nbytes, padding = self.nbytes(layer), self.table.layers[layer].padding * self.dtype.itemsize
        self.ledger.charge("parameters", nbytes - padding)
        self.ledger.charge("padding", padding)
        self.flats[layer].untyped_storage().resize_(nbytes)
        self.resident[layer] = True

    def fetch(self, layer: int) -> None:
        if self.resident[layer]:
            return
        self.open(layer)
        for (start, stop), shard in zip(self.table.chunks(layer), self.shards.chunks(layer), strict=True):
            self.wire.gather(self.weights[shard], self.flats[layer][start:stop])
            self.traffic.up_nbytes += self.weights[shard].nbytes

    def drop(self, layer: int) -> None:
        """Let a layer go."""
        if not self.resident[layer]:
            return
        nbytes, padding = self.nbytes(layer), self.table.layers[layer].padding * self.dtype.itemsize
        self.flats[layer].untyped_storage().resize_(0)
        self.ledger.free("parameters", nbytes - padding)
        self.ledger.free("padding", padding)
        self.resident[layer] = False

    def land(self, layer: int, slot: Slot, gradient: torch.Tensor) -> None:
        """A gradient takes its weight's place on the device, where the layer must be."""
        self.device_view(layer, slot).copy_(gradient)

    def retire(self, layer: int, landed: list[tuple[Slot, bool]]) -> None:
        """The gradients of a layer go to the host, averaged over the ranks, and the layer goes. Each slot comes with
        whether it is the first to land there; later ones are added. What did not land stays as it is."""
        for (start, stop), shard in zip(self.table.chunks(layer), self.shards.chunks(layer), strict=True):
            if not any(slot.start < stop and slot.stop > start for slot, _ in landed):
                continue
            mine = self.wire.reduce(self.flats[layer][start:stop])
            offset = start + self.wire.rank * mine.numel()  # where my shard begins in the layer
            for slot, first in landed:
                begin, end = max(slot.start, offset), min(slot.stop, offset + mine.numel())
                if begin >= end:
                    continue
                target = self._gradient_span(layer, shard, begin - offset, end - offset)
                source = mine[begin - offset : end - offset]
                if first:
                    target.copy_(source)
                else:
                    target.add_(source.to(target.device))
                self.traffic.down_nbytes += target.nbytes
        self.drop(layer)

    def _gradient_span(self, layer: int, shard: slice, begin: int, end: int) -> torch.Tensor:
        if self.gradients is None:
            return self.weights[shard.start + begin : shard.start + end]
        start = self.shards.trained_position(layer, shard) + begin
        return self.gradients[start : start + end - begin]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A contiguous part of a parameter on this rank's host."""

    inside: slice
    weight: torch.Tensor
    master: torch.Tensor
    states: list[torch.Tensor]
    gradient: torch.Tensor


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
