"""The update of what landed, layer by layer, where each layer's home is."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from scrimp.chunks._cuda_meter import CudaMeter
from scrimp.chunks._home import DEVICE, HOST
from scrimp.chunks._meter import CpuMeter
from scrimp.chunks._optim import Optimizer
from scrimp.chunks._store import Store
from scrimp.chunks._table import Slot
from scrimp.chunks._update import Updater, stage_numel

UPDATE_NBYTES = 28  # read and written per parameter: gradient, master, two moments, weight


class Updating:
    """`staged`: gradients are cast or scaled on their way."""

    def __init__(self, store: Store, optimizers: dict[str, Optimizer], meter: CpuMeter | CudaMeter, *, staged: bool) -> None:
        self.store = store
        self.optimizers = optimizers
        self.meter = meter
        slots = [slot for layer in store.table.layers for slot in layer.slots if slot.trainable]
        self._largest = max((slot.numel for slot in slots), default=0) if staged else 0
        self._host = Updater(torch.device("cpu"), self._largest)
        meter.ignore(self._host.stage)

    @property
    def stage_nbytes(self) -> int:
        """What an update on the device takes there."""
        return 4 * stage_numel(self.store.device, self._largest)

    def run(
        self, landed: list[tuple[int, Slot]], step: int, counts: dict[str, int], scale: torch.Tensor | None
    ) -> tuple[int, float]:
        """Bytes that the host touched, and its seconds."""
        by_layer: dict[int, list[Slot]] = {}
        for layer, slot in landed:
            by_layer.setdefault(layer, []).append(slot)
        there: Updater | None = None
        nbytes, seconds = 0, 0.0
        for layer, slots in by_layer.items():
            start = time.perf_counter()
            place = self.store.homes[layer].place
            if place == DEVICE:
                there = there or self._on_device()
                self._layer(there, layer, slots, step, counts, scale if scale is None else scale.to(self.store.device))
            else:
                self._layer(self._host, layer, slots, step, counts, scale)
            if place == HOST:
                nbytes += UPDATE_NBYTES * sum(slot.numel for slot in slots) // self.store.wire.world
                seconds += time.perf_counter() - start
        if there is not None:
            self.store.ledger.free("temporaries", there.stage.nbytes)
        return nbytes, seconds

    def _layer(
        self, updater: Updater, layer: int, slots: list[Slot], step: int, counts: dict[str, int], scale: torch.Tensor | None
    ) -> None:
        with self.store.opened(layer, write=True) as data:
            for slot in slots:
                count = counts[slot.name] = counts.get(slot.name, 0) + 1
                for piece in data.pieces(slot):
                    updater.apply(self.optimizers[slot.name], step, count, piece, scale, own_master=data.own_master)
        self.store.settled(layer)

    def _on_device(self) -> Updater:
        updater = Updater(self.store.device, self._largest)
        self.meter.ignore(updater.stage)
        self.store.ledger.charge("temporaries", updater.stage.nbytes)
        return updater


def restore_all(store: Store, landed: Iterable[tuple[int, Slot]]) -> None:
    """Instead of an update: weights again where gradients stand."""
    for layer, slot in landed:
        store.restore(layer, slot)
    for layer, space in enumerate(store.table.layers):
        if store.anchored(layer):  # gradients that stand there without having been retired
            for slot in space.slots[: sum(slot.trainable for slot in space.slots)]:
                store.restore(layer, slot)
