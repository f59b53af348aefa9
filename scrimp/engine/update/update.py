"""The optimizer update, layer by layer, on the tier of each layer: device, host, disk, or streamed through the device."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import torch

from scrimp.chunks import (
    DEVICE,
    DISK,
    STREAMED,
    Gate,
    Meter,
    Opened,
    Rules,
    Slot,
    Store,
    Updater,
    Worker,
    device_kernel,
    stage_numel,
    update_kinds,
)
from scrimp.engine.update.disk_update import DiskUpdates
from scrimp.engine.update.streamed_update import StreamedUpdates
from scrimp.errors import RunError

LAST = 1 << 30  # after all layers


class Updating:
    """Starts updates and owns the host worker. `staged`: gradients are cast or scaled in a staging buffer first."""

    def __init__(self, store: Store, rules: Rules, meter: Meter, *, staged: bool) -> None:
        self.store = store
        self.rules = rules
        self.meter = meter
        slots = [slot for layer in store.table.layers for slot in layer.slots if slot.trainable]
        self._state = store.optimizer.state
        self._largest = max((slot.numel for slot in slots), default=0) if staged or self._state != "fp32" else 0
        self._host = Updater(torch.device("cpu"), self._largest, state=self._state)
        meter.ignore(self._host.stage)
        dtypes = {store.dtype_of(layer) for layer in range(len(store.table.layers))}
        self._fused = device_kernel(store.device, update_kinds(rules.first, dtypes))
        self._start_threads()
        self.saw: Callable[[int, float], None] = lambda nbytes, seconds: None
        self._numel, self._seconds = 0, 0.0
        self._begun: list[Gate] = []  # in this step
        self._streaming: StreamedUpdates | None = None
        self._there: Updater | None = None

    def _start_threads(self) -> None:
        self.worker = Worker("the host's update")
        self.close = weakref.finalize(self, self.worker.close)  # at exit too: the thread must not outlive torch
        self._disk = DiskUpdates(self.store, self.worker, self._host, self.rules)

    def renew(self) -> None:
        """Restart the threads after a failure, when all placements are about to be rewritten. Started updates end first."""
        with suppress(RunError):
            self.store.spill.wait()
        self._disk.drop()
        self.close()
        if self._streaming is not None:
            self._streaming.close()
            self._streaming.start_threads()
        self.store.gates.clear()
        self._begun = []
        self._start_threads()

    def end(self) -> None:
        """End all threads when their started work is done. Spill files can still be read."""
        self.close()
        if self._streaming is not None:
            self._streaming.close()
        self.store.spill.queue.rest()

    def streaming(self, on: bool) -> None:
        """Allocate the buffers of streamed updates, or free them. Call it between steps, so that the meter does not count them
        as the model's."""
        if on and self._streaming is None:
            assert self._state == "fp32"  # masters and states must have one dtype; the planner streams no others
            self._streaming = StreamedUpdates(self.store, self.rules, self.meter, self._on_device())
        elif not on and self._streaming is not None:
            self._streaming.let_go()
            self._streaming = None

    def waited(self) -> tuple[float, float]:
        """Since the last call: seconds the host worker was busy, and seconds the step waited for updates."""
        busy, waited = self.worker.lap()
        return busy, waited + (self._streaming.worker.lap()[1] if self._streaming is not None else 0.0)

    def check(self) -> None:
        """Raise an error of an update thread, if there was one."""
        self.worker.check()
        if self._streaming is not None:
            self._streaming.worker.check()

    @property
    def stage_nbytes(self) -> int:
        """Bytes of the staging buffer of an update on the device."""
        return 4 * stage_numel(self.store.device, self._largest, self._fused, self._state)

    def run(self, arrived: list[tuple[int, Slot]], step: int, counts: dict[str, int], scale: torch.Tensor | None) -> None:
        """Update what arrived. Updates on host and disk overlap with what follows; a fetch waits only for its own layer."""
        by_layer = _by_layer(arrived)
        there = [layer for layer in by_layer if self.store.placements[layer].tier == DEVICE]
        for layer in sorted(by_layer.keys() - {*there}):  # before the device's queue fills
            self.start(layer, by_layer[layer], self.numbers(by_layer[layer], counts), step, scale)
        if there:
            updater = self._on_device()
            factor = None if scale is None else scale.to(self.store.device, non_blocking=True)
            for layer in there:
                slots = by_layer[layer]
                self.store.before_update(layer)
                with self.store.opened(layer) as data:
                    self._layer(updater, data, *self._joined(slots, self.numbers(slots, counts), step), step, factor)
                self.store.settled(layer)
            self.store.ledger.free("temporaries", updater.stage.nbytes)
        self.worker.submit(LAST, self._report, self._begun)
        self._begun = []

    def start(self, layer: int, slots: list[Slot], numbers: list[int], step: int, scale: torch.Tensor | None) -> None:
        """Let the worker update a layer once its gradients are on the host, and its states are read if they are on disk."""
        if self.store.placements[layer].tier == DISK and self.store.placement_nbytes(layer)[2]:
            self._disk.start(layer, slots, numbers, step, scale)
            return
        if self.store.placements[layer].tier == STREAMED:
            assert self._streaming is not None
            self._streaming.start(layer, slots, numbers, step, scale)
            return
        data, come = self.store.direct(layer), self.store.take_coming_down(layer)

        def job() -> None:
            self.store.before_update(layer)
            start = time.perf_counter()
            self._layer(self._host, data, slots, numbers, step, scale)
            self._seconds += time.perf_counter() - start
            self._numel += sum(slot.numel for slot in slots) // self.store.wire.world

        self.store.gates[layer] = self.worker.submit(layer, job, come)
        self._begun.append(self.store.gates[layer])

    def _report(self) -> None:
        """Report the bytes that the worker touched in a step, and its seconds."""
        nbytes = int((self._numel + self._disk.numel) * self.store.optimizer.update_nbytes)
        self.saw(nbytes, self._seconds + self._disk.seconds)
        self._numel, self._seconds = 0, 0.0
        self._disk.numel, self._disk.seconds = 0, 0.0

    def _layer(
        self, updater: Updater, data: Opened, slots: list[Slot], numbers: list[int], step: int, scale: torch.Tensor | None
    ) -> None:
        for slot, number in zip(slots, numbers, strict=True):
            for piece in data.pieces(slot):
                for state in piece.states if number == 1 else ():
                    state.zero_()  # already zero, but this lets all threads touch its pages; the kernel's blocks are too small
                updater.apply(self.rules.of(slot.name, step), step, number, piece, scale, own_master=data.own_master)

    def _joined(self, slots: list[Slot], numbers: list[int], step: int) -> tuple[list[Slot], list[int]]:
        """Merge neighbouring slots with equal settings into one, for the device kernel, which treats every element alike.
        Not with int8 states, whose rounding depends on an element's place in its parameter; nor under a plan, where a rank
        updates a share of each slot."""
        if self._fused is None or self._state != "fp32" or self.store.tiling is not None:
            return slots, numbers
        found: list[tuple[Slot, int]] = []
        for slot, number in sorted(zip(slots, numbers, strict=True), key=lambda row: row[0].start):
            last = found[-1] if found else None
            if last is not None and last[0].stop == slot.start and last[1] == number and self._alike(last[0], slot, step):
                joined = last[0].numel + slot.numel
                found[-1] = (replace(last[0], shape=(joined,)), number)
            else:
                found.append((slot, number))
        return [slot for slot, _ in found], [number for _, number in found]

    def _alike(self, one: Slot, other: Slot, step: int) -> bool:
        return self.rules.of(one.name, step) == self.rules.of(other.name, step)

    def numbers(self, slots: list[Slot], counts: dict[str, int]) -> list[int]:
        """Count the update; returns the number of updates of each slot, this one included."""
        for slot in slots:
            counts[slot.name] = counts.get(slot.name, 0) + 1
        return [counts[slot.name] for slot in slots]

    def updater(self, *, on_device: bool) -> Updater:
        """The updater for sparse exchange, which applies packets itself."""
        if not on_device:
            return self._host
        if self._there is None:
            self._there = self._on_device()
        return self._there

    def _on_device(self) -> Updater:
        updater = Updater(self.store.device, self._largest, self._fused, self._state)
        self.meter.ignore(updater.stage)
        self.store.ledger.charge("temporaries", updater.stage.nbytes)
        return updater


def restore_all(store: Store, arrived: Iterable[tuple[int, Slot]]) -> None:
    """Skip the update: put the weights back where gradients overwrote them."""
    by_layer = _by_layer(arrived)
    for layer, space in enumerate(store.table.layers):
        if store.anchored(layer):  # also gradients that have not been retired
            by_layer[layer] = list(space.slots[: sum(slot.trainable for slot in space.slots)])
    for layer, slots in by_layer.items():
        store.restore(layer, slots)


def _by_layer(arrived: Iterable[tuple[int, Slot]]) -> dict[int, list[Slot]]:
    found: dict[int, list[Slot]] = {}
    for layer, slot in arrived:
        found.setdefault(layer, []).append(slot)
    return found
