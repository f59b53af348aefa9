"""The tensors of a layer in a rank's file, part by part, from where they are: memory, the device, or a spill file.

A gradient overwrites its weight in the host's arenas, while a save in the background still reads the layer. Weights of trained
parameters are therefore made from their masters there: they are the rounded masters, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from scrimp.checkpoint._tiles import written, written_numel
from scrimp.checkpoint._write import Row, ShardFile
from scrimp.chunks import Opened, Store, block_numel

TILE = 1 << 20  # elements that are read at a time; whole blocks of a spill file


def layer_rows(store: Store, layer: int) -> Iterator[tuple[Row, str | int]]:
    """The tensors that this rank writes of a layer, and what of the layer each is."""
    numel, trained = store.shards.numel(layer), store.shards.trained_numel(layer)
    if store.tiling is not None:
        numel, trained = written_numel(store, layer)
    wide = store.dtype_of(layer) == torch.float32
    yield (f"weights.{layer}", store.dtype_of(layer), (numel,)), "weights"
    if not wide:
        yield (f"master.{layer}", torch.float32, (trained,)), "master"
    for k, field in enumerate(store.optimizer.fields):
        yield (f"state-{k}.{layer}", field.dtype, (field.numel(trained),)), k


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """A layer's data as it is. `rounded`: weights are made from masters."""

    store: Store
    data: Opened
    rounded: bool = False

    def append_to(self, file: ShardFile) -> None:
        for (name, dtype, (numel,)), which in layer_rows(self.store, self.data.layer):
            if self.store.tiling is not None:
                for part in written(self.store, self.data, which, rounded=self.rounded):
                    file.append(name, part)
            elif which == "weights" and self.rounded and not self.data.own_master:
                for start in range(0, numel, TILE):
                    file.append(name, self._weights(slice(start, min(start + TILE, numel)), dtype))
            else:
                file.append(name, self.data.states[which] if isinstance(which, int) else getattr(self.data, which))

    def _weights(self, span: slice, dtype: torch.dtype) -> torch.Tensor:
        return rounded_weights(self.store, self.data.layer, span, self.data.weights, self.data.master[span].cpu())


def rounded_weights(store: Store, layer: int, span: slice, weights: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Weights of a part of a layer's arena: of trained parameters from `master`, the same part of the masters, which may end
    before; of frozen ones as they are."""
    made = torch.zeros(span.stop - span.start, dtype=weights.dtype)
    for slot in store.table.layers[layer].slots:
        for spans in store.shards.pieces(layer, slot):
            start, stop = max(spans.weights.start, span.start), min(spans.weights.stop, span.stop)
            if start < stop:
                here = slice(start - span.start, stop - span.start)
                made[here] = (master[here] if slot.trainable else weights[start:stop]).to(device="cpu", dtype=made.dtype)
    return made


@dataclass(frozen=True, kw_only=True)
class OnDisk:
    """A layer whose masters and states are in a spill file, which no update writes now. Read a tile at a time."""

    store: Store
    layer: int

    def append_to(self, file: ShardFile) -> None:
        own_master = self.store.dtype_of(self.layer) == torch.float32
        weights = self.store.placements[self.layer].weights
        for (name, dtype, (numel,)), which in layer_rows(self.store, self.layer):
            if which == "weights":
                for start in range(0, numel, TILE):
                    span = slice(start, min(start + TILE, numel))
                    file.append(name, weights[span] if own_master else self._weights(span, weights))
                continue
            region = 0 if which == "master" else int(which) + (0 if own_master else 1)
            for start in range(0, numel, TILE):
                file.append(name, self._read(region, dtype, start, min(start + TILE, numel), numel))

    def _weights(self, span: slice, weights: torch.Tensor) -> torch.Tensor:
        trained = self.store.shards.trained_numel(self.layer)
        master = self._read(0, torch.float32, span.start, min(span.stop, trained), trained)
        return rounded_weights(self.store, self.layer, span, weights, master)

    def _read(self, region: int, dtype: torch.dtype, start: int, stop: int, numel: int) -> torch.Tensor:
        placement = self.store.placements[self.layer]
        if stop <= start or placement.fresh:  # nothing was written yet, so all of it is zero
            return torch.zeros(max(0, stop - start), dtype=dtype)
        assert placement.file is not None
        assert start % block_numel() == 0
        tensor = torch.empty(stop - start, dtype=dtype)
        placement.file.read(str(region), tensor, start * dtype.itemsize)
        return tensor
