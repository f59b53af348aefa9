"""Error-feedback residuals: the part of each parameter's update that was not sent yet, on the tier of its layer.

The ledger counts their bytes as `residual`, on the tier where they are. Their number format and tier may be "auto". Then the
planner chooses them together with placements and activations, because all three share the device's bytes: fewer bits per
residual may let more layers stay on the device, or avoid recomputing them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import product

import torch

from scrimp.chunks import DEVICE, Store
from scrimp.engine.gradients.local_shards import Share
from scrimp.exchange import AUTO, RESIDUAL_KINDS, RESIDUAL_PLACES, Residual, Sparse, feedback_pieces, residual, residual_nbytes

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Way:
    """Number format (`kind`) of the residuals, and the tier (`place`) of those whose layer is placed on the device."""

    kind: str
    place: str


class Residuals:
    """Allocates, converts and moves the residuals. `shares`: of each layer those that have a residual."""

    def __init__(self, store: Store, settings: Sparse, rank: int, shares: list[list[Share]]) -> None:
        self.store, self.shares, self._rank = store, shares, rank
        kinds = RESIDUAL_KINDS if settings.residual == AUTO else (settings.residual,)
        places = RESIDUAL_PLACES if settings.place == AUTO else (settings.place,)
        self.ways = [Way(kind=kind, place=place) for kind, place in product(kinds, places)]  # the most precise first
        self.way = self.ways[0]
        self._held: dict[str, Residual] = {}
        self._settled: list[tuple[str, int] | None] = [None] * len(shares)  # on which tier, and how many bytes
        for layer in range(len(shares)):
            self.settle(layer)

    def of(self, name: str) -> Residual:
        return self._held[name]

    def nbytes(self, layer: int, way: Way) -> int:
        return sum(residual_nbytes(way.kind, share.numel) for share in self.shares[layer])

    def residual_bytes(self, layer: int) -> int:
        """Device bytes of a layer's residuals if the layer is placed on the device."""
        return self.nbytes(layer, self.way) if self.way.place == "device" else 0

    def become(self, way: Way) -> None:
        if way != self.way:
            self.store.wait()  # the host worker may still be sending from residuals that are about to move
            self.way = way
            for layer in range(len(self.shares)):
                self.settle(layer)

    def settle(self, layer: int) -> None:
        """Move a layer's residuals to the tier of its layer, in the current number format."""
        on_device = self.store.placements[layer].tier == DEVICE
        tier = "device" if on_device and self.way.place == "device" else "host"
        worker = self.store.device if on_device else CPU
        for share in self.shares[layer]:
            seed = (self._rank << 32) + zlib.crc32(share.name.encode())
            fresh = residual(self.way.kind, share.numel, worker, seed, at=CPU if tier == "host" else None)
            for tensor in fresh.tensors.values():
                self.store.own(tensor)
            if share.name in self._held:
                self.store.copy_streams.settle()  # the device may still be writing them
                _carry(fresh, self._held[share.name], share.numel)
            self._held[share.name] = fresh
        books = {"device": self.store.ledger, "host": self.store.books.host}
        before, self._settled[layer] = self._settled[layer], (tier, self.nbytes(layer, self.way))
        self.store.before_change()
        if before is not None:
            books[before[0]].free("residual", before[1])
        books[tier].charge("residual", self.nbytes(layer, self.way))


def _carry(into: Residual, old: Residual, numel: int) -> None:
    if [tensor.dtype for tensor in into.tensors.values()] == [tensor.dtype for tensor in old.tensors.values()]:
        for name, tensor in into.tensors.items():
            tensor.copy_(old.tensors[name])
        return
    for span in feedback_pieces(numel, into.device):
        into.write(span, old.read(span).to(into.device))
