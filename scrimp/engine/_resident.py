"""Which layers are on the device, moment by moment.

A moment begins when a layer is asked for that was not the last one: by its forward, by a recomputation, or by autograd
unpacking one of its weights. The first step (and any step that asks in another order than was recorded) holds just the
layers that are running: that is the least, and it records the moments with the most that everything else took in each.
From that a schedule is made, and the steps after it follow the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from scrimp.chunks._cuda_meter import CudaMeter
from scrimp.chunks._meter import CpuMeter
from scrimp.chunks._residency import Moment, Schedule, schedule
from scrimp.chunks._store import Store
from scrimp.chunks._table import Slot


@dataclass(frozen=True, kw_only=True)
class Handle:
    """What autograd keeps of a weight: where it is, not what it is."""

    layer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Residents:
    """`budget_nbytes` is for weights and all that the meter counts; `retire(layer, slots)` is called when a layer's
    gradients are complete."""

    def __init__(
        self, store: Store, meter: CpuMeter | CudaMeter, budget_nbytes: int, retire: Callable[[int, list[Slot]], None]
    ) -> None:
        self.store = store
        self.meter = meter
        self.budget_nbytes = budget_nbytes
        self.schedule: Schedule | None = None
        self._trace: list[Moment] = []
        self._recorded: tuple[tuple[int, ...], ...] = ()
        self._running: list[int] = []
        self._held: set[int] = set()  # recomputed, and not yet through with backward
        self._current: tuple[int, ...] = ()
        self._following = False
        self._aside = False
        self._step = 0
        self._ends: list[int] = []
        self._retire = retire
        self._trained = [sum(slot.trainable for slot in layer.slots) for layer in store.table.layers]
        self._landed: dict[int, list[Slot]] = {}  # gradients that stand where weights stood
        self._by_storage = {flat.untyped_storage()._cdata: k for k, flat in enumerate(store.flats)}

    # Steps.

    def begin_step(self, step: int) -> None:
        self._step = step
        self._trace, self._current, self._ends = [], (), []
        self._following = self.schedule is not None
        self._landed = {}
        self.say("forward")
        self.meter.reset_peak()

    def end_step(self) -> None:
        self._close_moment()
        for layer, resident in enumerate(self.store.resident):
            if resident and self._trained[layer]:
                self.store.drop(layer)  # its weights are about to change
        asked = tuple(moment.needs for moment in self._trace)
        if not self._following:
            self.schedule = self._plan()
            self._recorded = asked
        self._held.clear()

    def abandon(self) -> None:
        self._running.clear()
        self._held.clear()
        self._landed.clear()
        for layer in range(len(self.store.resident)):
            self.store.drop(layer)
        self.schedule = None

    def before_landing(self, layer: int) -> None:
        """A gradient needs its layer's place on the device. If it is the only one of the layer, just the place."""
        if not self.store.resident[layer]:
            self.touch(layer, empty=self._trained[layer] == 1)

    def landed(self, layer: int, slot: Slot) -> None:
        """A gradient has taken its weight's place; with a layer's last one its weights are through for this backward."""
        slots = self._landed.setdefault(layer, [])
        slots.append(slot)
        if len(slots) == self._trained[layer]:
            self._finish(layer)

    def retire_rest(self) -> None:
        """After a backward: layers some of whose parameters got no gradient."""
        for layer in sorted(self._landed):
            self._finish(layer)
        self._held.clear()

    def _finish(self, layer: int) -> None:
        self._held.discard(layer)
        self._retire(layer, sorted(self._landed.pop(layer), key=lambda slot: slot.start))
        self._ends.append(layer)

    # Asking for layers.

    @contextmanager
    def running(self, layer: int) -> Iterator[None]:
        self._running.append(layer)
        try:
            self.touch(layer)
            yield
        finally:
            self._running.remove(layer)
            if torch._C._current_graph_task_id() != -1:  # a recomputation inside backward: needed until its gradients land
                self._held.update(self.store.table.layers[layer].needs)

    def touch(self, layer: int, *, empty: bool = False) -> None:
        """Bring a layer and what it shares; or, `empty`, make room for the layer without its weights."""
        pinned = {other for running in self._running for other in self.store.table.layers[running].needs}
        needs = tuple(sorted({*self.store.table.layers[layer].needs} | pinned | self._held | {*self._landed}))
        if needs == self._current and all(self.store.resident[other] for other in needs):
            return
        bring = [other for other in needs if not (empty and other == layer)]
        if self._aside:
            self._current = needs
            self.store.ledger.moment = f"in an evaluation, {self.place()}"
            self._drop_others(needs)
            self._bring(bring, layer)
            return
        self._close_moment()
        self._current = needs
        self.say("forward" if torch._C._current_graph_task_id() == -1 else "backward")
        at = len(self._trace)
        if self._following and (at >= len(self._recorded) or self._recorded[at] != needs):
            self._following, self.schedule = False, None  # another order than recorded: record again from here
        if self._following and self.schedule is not None:
            for other in self.schedule.drops[at]:
                self.store.drop(other)
        else:
            self._drop_others(needs)
        self._bring(bring, layer)

    def place(self) -> str:
        """Where the step is, in words."""
        return f"at layer {', '.join(self._name(layer) for layer in self._current)}" if self._current else "between layers"

    def say(self, phase: str) -> None:
        """Tell the ledger when it is."""
        self.store.ledger.moment = f"in step {self._step}, {phase} {self.place()}"

    def make_room(self) -> None:
        """Let go of everything that nobody is using."""
        for other, resident in enumerate(self.store.resident):
            if resident and other not in self._current and other not in self._landed:
                self.store.drop(other)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For what is not part of a training step: hold only what runs, leave the record alone."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False
            self._current = ()

    def saving(self) -> saved_tensors_hooks:
        """Autograd keeps handles of weights instead of weights, and asks for them when it needs them."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _drop_others(self, needs: tuple[int, ...]) -> None:
        for other, resident in enumerate(self.store.resident):
            if resident and other not in needs:
                self.store.drop(other)

    def _bring(self, bring: list[int], layer: int) -> None:
        missing = {other for other in (*bring, layer) if not self.store.resident[other]}
        self.meter.expect(sum(self.store.nbytes(other) for other in missing))
        for other in bring:
            self.store.fetch(other)
        if not self.store.resident[layer]:
            self.store.open(layer)

    def _pack(self, tensor: torch.Tensor) -> Any:
        layer = self._by_storage.get(tensor.untyped_storage()._cdata)
        if layer is None:
            self.meter.mark_saved(tensor)
            return tensor.detach()  # an output that is saved with its graph would be a cycle, and outlive a failed step
        return Handle(layer=layer, size=tuple(tensor.shape), stride=tensor.stride(), offset=int(tensor.storage_offset()))

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Handle):
            self.touch(packed.layer)
            return self.store.flats[packed.layer].as_strided(packed.size, packed.stride, packed.offset)
        tensor: torch.Tensor = packed
        return tensor

    # Recording.

    def _close_moment(self) -> None:
        if self._current:
            peak = self.meter.reset_peak()
            label = f"moment {len(self._trace)} ({', '.join(self._name(k) for k in self._current)})"
            self._trace.append(Moment(needs=self._current, room_nbytes=peak, ends=tuple(self._ends), label=label))
            self._ends = []

    def _plan(self) -> Schedule:
        """`room_nbytes` of the record is what others took; here it becomes what they left."""
        rooms = [
            Moment(needs=m.needs, room_nbytes=self.budget_nbytes - m.room_nbytes, ends=m.ends, label=m.label) for m in self._trace
        ]
        return schedule(rooms, [self.store.nbytes(layer) for layer in range(len(self.store.flats))])

    def _name(self, layer: int) -> str:
        return self.store.table.layers[layer].path or "the model itself"
