"""The updates that pass through the device, layer after layer: of those whose gradients are there, the lowest first.

A thread of its own hands the device one layer after the other, each when the copies of the one before are nearly up: so the
layers that the next forward wants first need not queue behind those whose gradients came first.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from scrimp.chunks._cuda_meter import CudaMeter
from scrimp.chunks._home import Piece
from scrimp.chunks._meter import CpuMeter
from scrimp.chunks._rules import Rules
from scrimp.chunks._store import Store
from scrimp.chunks._table import Slot
from scrimp.chunks._through import Part, Through, tiles
from scrimp.chunks._update import Updater
from scrimp.chunks._worker import Worker


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One layer's update in one step; in a thread that keeps nothing else alive."""

    store: Store
    through: Through
    updater: Updater
    rules: Rules
    layer: int
    slots: list[Slot]
    counts: list[int]
    step: int
    scale: torch.Tensor | None

    def run(self) -> None:
        todo = tiles(self.slots, self.counts, self.through.tile)
        passed = self.through.update(self.layer, self.store.direct(self.layer), todo, self._apply, self.scale)
        self.store.passed(self.layer, passed.updated, passed.home)
        if passed.nearly_up is not None:
            passed.nearly_up.synchronize()

    def _apply(self, part: Part, piece: Piece) -> None:
        self.updater.apply(self.rules.of(part.slot.name, self.step), self.step, part.count, piece, self.scale, own_master=False)


def largest_numel(store: Store) -> int:
    return max(store.shards.trained_numel(layer) for layer in range(len(store.homes)))


class Passing:
    def __init__(self, store: Store, rules: Rules, meter: CpuMeter | CudaMeter, updater: Updater) -> None:
        self.store = store
        self._rules = rules
        self._updater = updater
        self._through = Through(store.device, store.optimizer.states + 1, largest_numel(store))
        for tensor in (tensor for stage in self._through.stages for tensor in stage):
            meter.ignore(tensor)
        store.ledger.charge("optimizer", self._through.nbytes)
        self.hire()

    def let_go(self) -> None:
        """Give the stages back, when nothing passes any more."""
        self.close()
        self.store.lanes.settle()
        self.store.before_change()
        self.store.ledger.free("optimizer", self._through.nbytes)
        self.store.ledger.free("temporaries", self._updater.stage.nbytes)

    def hire(self) -> None:
        self.worker = Worker("the update that passes through the device")
        self.close = weakref.finalize(self, self.worker.close)

    def start(self, layer: int, slots: list[Slot], counts: list[int], step: int, scale: torch.Tensor | None) -> None:
        """The layer's next use waits for it, on the device."""
        job = _Pass(
            store=self.store,
            through=self._through,
            updater=self._updater,
            rules=self._rules,
            layer=layer,
            slots=slots,
            counts=counts,
            step=step,
            scale=None if scale is None else scale.to(self.store.device, non_blocking=True),
        )
        self.store.settled(layer)
        nbytes = sum(tensor.nbytes for tensor in self.store.homes[layer].tensors[1:])  # all but the weights
        self.store.traffic.up_nbytes += nbytes
        self.store.traffic.down_nbytes += nbytes
        if self.store.lanes.overlapped:
            landed = torch.cuda.current_stream(self.store.device).record_event()
            self.store.gates[layer] = self.worker.submit(layer, job.run, [landed])
        else:
            job.run()
