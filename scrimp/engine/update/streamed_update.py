"""Updates streamed through the device, one layer after the other: of the layers whose gradients have arrived, the lowest first.

Master weights and optimizer states stay on the host. A thread submits a layer when the copies up of the layer before are nearly
done. So layers that the next forward needs first do not queue behind layers whose gradients merely came first.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from scrimp.chunks import Meter, Part, Piece, Rules, Slot, Store, StreamedUpdate, Updater, Worker, update_tiles


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One layer's update in one step. It holds no reference to the engine, since it runs in a thread."""

    store: Store
    streamed: StreamedUpdate
    updater: Updater
    rules: Rules
    layer: int
    slots: list[Slot]
    counts: list[int]
    step: int
    scale: torch.Tensor | None

    def run(self) -> None:
        self.store.before_update(self.layer)
        todo = update_tiles(self.slots, self.counts, self.streamed.tile)
        passed = self.streamed.update(self.layer, self.store.direct(self.layer), todo, self._apply, self.scale)
        self.store.passed(self.layer, passed.updated, passed.placement)
        if passed.nearly_up is not None:
            passed.nearly_up.synchronize()

    def _apply(self, part: Part, piece: Piece) -> None:
        self.updater.apply(self.rules.of(part.slot.name, self.step), self.step, part.count, piece, self.scale, own_master=False)


def largest_numel(store: Store) -> int:
    return max(store.shards.trained_numel(layer) for layer in range(len(store.placements)))


class StreamedUpdates:
    """Schedules streamed updates on a thread, and owns their staging buffers on the device."""

    def __init__(self, store: Store, rules: Rules, meter: Meter, updater: Updater) -> None:
        self.store = store
        self._rules = rules
        self._updater = updater
        self._streamed = StreamedUpdate(store.device, store.optimizer.states + 1, largest_numel(store))
        for tensor in (tensor for stage in self._streamed.stages for tensor in stage):
            meter.ignore(tensor)
        store.ledger.charge("optimizer", self._streamed.nbytes)
        self.start_threads()

    def let_go(self) -> None:
        """Free the staging buffers, when no layer is streamed any more."""
        self.close()
        self.store.copy_streams.settle()
        self.store.before_change()
        self.store.ledger.free("optimizer", self._streamed.nbytes)
        self.store.ledger.free("temporaries", self._updater.stage.nbytes)

    def start_threads(self) -> None:
        self.worker = Worker("the streamed update")
        self.close = weakref.finalize(self, self.worker.close)

    def start(self, layer: int, slots: list[Slot], counts: list[int], step: int, scale: torch.Tensor | None) -> None:
        """Start a layer's update; the layer's next use waits for it, on the device."""
        job = _Pass(
            store=self.store,
            streamed=self._streamed,
            updater=self._updater,
            rules=self._rules,
            layer=layer,
            slots=slots,
            counts=counts,
            step=step,
            scale=None if scale is None else scale.to(self.store.device, non_blocking=True),
        )
        self.store.settled(layer)
        nbytes = sum(tensor.nbytes for tensor in self.store.placements[layer].tensors[1:])  # all but the weights
        self.store.traffic.up_nbytes += nbytes
        self.store.traffic.down_nbytes += nbytes
        if self.store.copy_streams.overlapped:
            arrived = torch.cuda.current_stream(self.store.device).record_event()
            self.store.gates[layer] = self.worker.submit(layer, job.run, [arrived])
        else:
            job.run()
