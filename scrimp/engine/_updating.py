"""The update of what landed, layer by layer, where each layer's home is."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable

import torch

from scrimp.chunks._cuda_meter import CudaMeter
from scrimp.chunks._home import DEVICE, HOST, Opened
from scrimp.chunks._meter import CpuMeter
from scrimp.chunks._optim import Optimizer, rate
from scrimp.chunks._store import Store
from scrimp.chunks._table import Slot
from scrimp.chunks._update import Updater, stage_numel
from scrimp.chunks._worker import Worker
from scrimp.errors import RunError

LAST = 1 << 30  # after all layers


class Updating:
    """`staged`: gradients are cast or scaled on their way."""

    def __init__(self, store: Store, optimizers: dict[str, Optimizer], meter: CpuMeter | CudaMeter, *, staged: bool) -> None:
        self.store = store
        self.optimizers = optimizers
        self.meter = meter
        slots = [slot for layer in store.table.layers for slot in layer.slots if slot.trainable]
        self._state = store.optimizer.state
        self._largest = max((slot.numel for slot in slots), default=0) if staged or self._state != "fp32" else 0
        # The worker's, and one for homes on disk, which are updated beside it: a stage is one thread's.
        self._host, self._disk = (Updater(torch.device("cpu"), self._largest, self._state) for _ in range(2))
        for updater in (self._host, self._disk):
            meter.ignore(updater.stage)
        self._hire()
        self.saw: Callable[[int, float], None] = lambda nbytes, seconds: None
        self._nbytes, self._seconds = 0, 0.0

    def _hire(self) -> None:
        self.worker = Worker("the host's update")
        self.close = weakref.finalize(self, self.worker.close)  # at exit too: the thread must not outlive torch

    def renew(self) -> None:
        """After a failure, when all homes are about to be written anew."""
        self.close()
        self.store.gates.clear()
        self._hire()

    @property
    def stage_nbytes(self) -> int:
        """What an update on the device takes there."""
        return 4 * stage_numel(self.store.device, self._largest, self._state)

    def run(self, landed: list[tuple[int, Slot]], step: int, counts: dict[str, int], scale: torch.Tensor | None) -> None:
        """Homes on the host are updated by the worker, beside what comes next; whoever asks for one waits for it alone."""
        by_layer: dict[int, list[Slot]] = {}
        for layer, slot in landed:
            by_layer.setdefault(layer, []).append(slot)
        there: Updater | None = None
        for layer, slots in by_layer.items():
            numbers = self.numbers(slots, counts)
            place = self.store.homes[layer].place
            if place == HOST:
                self.start(layer, slots, numbers, step, scale)
                continue
            updater, factor = self._disk, scale
            if place == DEVICE:
                there = there or self._on_device()
                updater, factor = there, None if scale is None else scale.to(self.store.device)
            with self.store.opened(layer, write=True) as data:
                self._layer(updater, data, slots, numbers, step, factor)
            self.store.settled(layer)
        if there is not None:
            self.store.ledger.free("temporaries", there.stage.nbytes)
        self.worker.submit(LAST, self._report)

    def start(self, layer: int, slots: list[Slot], numbers: list[int], step: int, scale: torch.Tensor | None) -> None:
        """Let the worker update a layer as soon as its gradients are down."""
        data, come = self.store.direct(layer), self.store.take_coming_home(layer)

        def job() -> None:
            for event in come:
                event.synchronize()
            start = time.perf_counter()
            self._layer(self._host, data, slots, numbers, step, scale)
            self._seconds += time.perf_counter() - start
            numel = sum(slot.numel for slot in slots) // self.store.wire.world
            self._nbytes += int(numel * self.store.optimizer.update_nbytes)

        self.store.gates[layer] = self.worker.submit(layer, job)

    def _report(self) -> None:
        """What the worker has touched in a step, and in how many seconds."""
        self.saw(self._nbytes, self._seconds)
        self._nbytes, self._seconds = 0, 0.0

    def _layer(
        self, updater: Updater, data: Opened, slots: list[Slot], numbers: list[int], step: int, scale: torch.Tensor | None
    ) -> None:
        for slot, number in zip(slots, numbers, strict=True):
            for piece in data.pieces(slot):
                updater.apply(self.optimizers[slot.name], step, number, piece, scale, own_master=data.own_master)

    def check_rates(self, step: int) -> None:
        """Ask for the learning rates before anything has happened, in case asking fails."""
        for optimizer in {id(optimizer.lr): optimizer for optimizer in self.optimizers.values()}.values():
            value = rate(optimizer, step)
            if not 0 <= value < float("inf"):
                raise RunError(f"the learning rate of step {step} is {value!r}")

    def numbers(self, slots: list[Slot], counts: dict[str, int]) -> list[int]:
        """How often each was updated, this time included."""
        for slot in slots:
            counts[slot.name] = counts.get(slot.name, 0) + 1
        return [counts[slot.name] for slot in slots]

    def _on_device(self) -> Updater:
        updater = Updater(self.store.device, self._largest, self._state)
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
