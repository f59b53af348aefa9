"""What each parameter has not sent yet, where its layer's home is: beside it on the device, if that was asked for, else on the
host. Its bytes are the ledger's `residual`, on the tier where they are."""

from __future__ import annotations

import zlib

import torch

from scrimp.chunks._home import DEVICE
from scrimp.chunks._store import Store
from scrimp.chunks._table import Slot
from scrimp.exchange._residual import Residual, residual, residual_nbytes
from scrimp.exchange._settings import Sparse

CPU = torch.device("cpu")


class Residuals:
    """`slots`: those of each layer that have one."""

    def __init__(self, store: Store, settings: Sparse, rank: int, slots: list[list[Slot]]) -> None:
        self.store, self.settings, self.slots, self._rank = store, settings, slots, rank
        self._held: dict[str, Residual] = {}
        self._places: list[str] = [""] * len(slots)
        for layer in range(len(slots)):
            self.settle(layer)

    def of(self, name: str) -> Residual:
        return self._held[name]

    def nbytes(self, layer: int) -> int:
        return sum(residual_nbytes(self.settings.residual, slot.numel) for slot in self.slots[layer])

    def beside_nbytes(self, layer: int) -> int:
        """What they take on the device, if the layer's home is there."""
        return self.nbytes(layer) if self.settings.place == "device" else 0

    def settle(self, layer: int) -> None:
        """Be where the layer's home is now."""
        at_home = self.store.homes[layer].place == DEVICE
        place = "device" if at_home and self.settings.place == "device" else "host"
        worker = self.store.device if at_home else CPU
        nbytes = self.nbytes(layer)
        fresh = {}
        for slot in self.slots[layer]:
            seed = (self._rank << 32) + zlib.crc32(slot.name.encode())
            at = CPU if place == "host" else None
            fresh[slot.name] = residual(self.settings.residual, slot.numel, worker, seed, at=at)
            for name, tensor in fresh[slot.name].tensors.items():
                self.store.own(tensor)
                if slot.name in self._held:
                    tensor.copy_(self._held[slot.name].tensors[name])
        books = {"device": self.store.ledger, "host": self.store.books.host}
        if self._places[layer]:
            books[self._places[layer]].free("residual", nbytes)
        self.store.before_change()
        self._held.update(fresh)
        books[place].charge("residual", nbytes)
        self._places[layer] = place
