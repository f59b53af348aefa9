"""Gradients for a sparse exchange: summed along all mesh axes but one, along which each rank keeps its own summand.

A sparse exchange gives the mean over n ranks of what they bring, and the gradient is the sum of their summands. So the loss of a
backward is multiplied by n (`gain`): a summand is then the gradient of the mean loss of this rank's part of the batch, as in an
engine without a plan. A gradient that is the same on all n ranks, because no operator split its batch along the axis, is divided
by n again: the mean of n equal gradients is the gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from scrimp.chunks import DEVICE
from scrimp.engine.lowered.weights import EngineWeights
from scrimp.lower import Rest, Summed, summed
from scrimp.planner import Placed, common


class SparseWeights(EngineWeights):
    """`axis`: along which ranks keep their summands."""

    def __init__(self, *args: Any, axis: str) -> None:
        super().__init__(*args)
        self._axis, self.gain = axis, self.comm.mesh.axis_size(axis)

    def later(self, name: str) -> tuple[str, ...]:
        """Nothing: a rank sums along the other axes at once, because the exchange takes a gradient as it is made."""
        return ()

    def _adds_up(self, name: str) -> bool:
        """The exchange takes a gradient once, when it is whole."""
        return False

    def _sums(self, name: str, gradient: torch.Tensor, place: Placed, *, donate: bool) -> list[Summed]:
        return [Summed(self._layer, name, self._summed(name, gradient, place, donate=donate))]

    def _summed(self, name: str, gradient: torch.Tensor, place: Placed, *, donate: bool) -> torch.Tensor:
        each, storage = self.rest[name], gradient.untyped_storage().data_ptr()
        kept = (self._axis,) if self._keeps(place, each) else ()
        flat = summed(self.comm, gradient, place, each, each.states, later=kept, donate=donate)
        if not kept:
            return flat / self.gain
        alias = not donate and flat.untyped_storage().data_ptr() == storage
        return flat.clone() if alias else flat  # later operators may still change what is not donated

    def _keeps(self, place: Placed, each: Rest) -> bool:
        """Whether ranks have summands, and one move takes them to the weight's placement. If it takes two, ranks sum first."""
        if self._axis not in place.partial:
            return False
        after = replace(each.use, partial=(self._axis,))
        return place.dims == each.use.dims or common(place, after, self.comm.mesh) is not None

    def _own(self, name: str) -> bool:
        """The exchange consumes gradients of layers on the device as they come, so that they overwrite no weight."""
        layer, _ = self.places[name]
        return (self._data.consumed and self._data.placements[layer].tier == DEVICE) or super()._own(name)
