"""The placement of one layer on this rank: its `Tier`, and its tensors there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import torch

from scrimp.chunks.spill.file import SpillFile
from scrimp.chunks.tables.shards import Shards
from scrimp.chunks.tables.state_codec import Field
from scrimp.chunks.tables.table import Slot


class Tier(StrEnum):
    """Where a layer's master weights and optimizer states are, and the weights that it is fetched from."""

    HOST = "host"  # weights, masters and states in the host's arenas
    DEVICE = "device"  # all of them on the device; updated there, never copied
    DISK = "disk"  # weights in the host's arenas, masters and states in a spill file; staged on the host for each update
    STREAMED = (
        "streamed"  # weights stay on the device, masters and states are on the host; streamed to the device for each update
    )


HOST, DEVICE, DISK, STREAMED = Tier.HOST, Tier.DEVICE, Tier.DISK, Tier.STREAMED


@dataclass(kw_only=True)
class Placement:
    """`master` is None where fp32 weights are their own master. `gradients` is None where a gradient overwrites its weight. On
    disk `master` and `states` are empty here."""

    tier: Tier
    weights: torch.Tensor
    gradients: torch.Tensor | None
    master: torch.Tensor | None
    states: list[torch.Tensor] = field(default_factory=list)
    file: SpillFile | None = None
    fresh: bool = True  # nothing was written to the file yet
    _opened: Opened | None = field(default=None, init=False, repr=False, compare=False)  # cached, because it is read often

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of it, once."""
        return [t for t in (self.weights, self.gradients, self.master, *self.states) if t is not None]

    def _same(self, last: Opened) -> bool:
        master = self.weights if self.master is None else self.master
        mine, its = (self.weights, self.gradients, master, self.states), (last.weights, last.gradients, last.master, last.states)
        return all(one is other for one, other in zip(mine, its, strict=True))

    def opened(self, layer: int, shards: Shards, fields: tuple[Field, ...]) -> Opened:
        last = self._opened
        if last is not None and self._same(last):
            return last
        self._opened = Opened(
            layer=layer,
            shards=shards,
            weights=self.weights,
            gradients=self.gradients,
            master=self.weights if self.master is None else self.master,
            states=self.states,
            fields=fields,
        )
        return self._opened


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A contiguous part of a parameter on this rank, at `inside` of the parameter. Gradient and weight may be the same memory,
    weight and master too. States are as the optimizer's fields."""

    inside: slice
    weight: torch.Tensor
    gradient: torch.Tensor
    master: torch.Tensor
    states: list[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A layer's data, all in memory."""

    layer: int
    shards: Shards
    weights: torch.Tensor
    gradients: torch.Tensor | None
    master: torch.Tensor
    states: list[torch.Tensor]
    fields: tuple[Field, ...]

    @property
    def own_master(self) -> bool:
        return self.master is self.weights

    def pieces(self, slot: Slot) -> Iterator[Piece]:
        for index in range(len(self.shards.pieces(self.layer, slot))):
            yield self.piece(slot, index)

    @cached_property
    def _pieces(self) -> dict[tuple[int, int, int], Piece]:
        return {}

    def piece(self, slot: Slot, index: int) -> Piece:
        key = slot.start, slot.stop, index
        if key not in self._pieces:
            spans = self.shards.pieces(self.layer, slot)[index]
            weight = self.weights[spans.weights]
            self._pieces[key] = Piece(
                inside=spans.inside,
                weight=weight,
                gradient=weight if self.gradients is None else self.gradients[spans.gradients],
                master=weight if self.own_master else self.master[spans.states],
                states=[state[field.span(spans.states)] for state, field in zip(self.states, self.fields, strict=True)],
            )
        return self._pieces[key]


MASTER = Field(dtype=torch.float32)


def optimized(dtype: torch.dtype, fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """The fields of masters, unless fp32 weights are their own, and of states."""
    return fields if dtype == torch.float32 else (MASTER, *fields)


def placement_nbytes(
    shards: Shards, layer: int, dtype: torch.dtype, fields: tuple[Field, ...], micro_batches: int
) -> tuple[int, int, int]:
    """Bytes of a layer's placement on one rank: (weights, separate gradients, masters and states)."""
    trained = shards.trained_numel(layer)
    gradients = shards.summed_numel(layer) * dtype.itemsize if dtype == torch.float32 or micro_batches > 1 else 0
    rest = sum(field.nbytes(trained) for field in optimized(dtype, fields))
    return shards.numel(layer) * dtype.itemsize, gradients, rest
