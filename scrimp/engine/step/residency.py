"""Decides which layers are resident on the device at each schedule step; fetches and evicts them.

A schedule step begins when a layer is requested that the previous one did not need: by its forward, by a recomputation, or by
autograd unpacking one of its weights. A tracing step keeps only the running layers resident, which takes the least memory. It
records the schedule steps, with the peak of all other memory in each. From the trace the planner makes a schedule of prefetches
and evictions, which the next steps follow. A step that requests layers in another order continues as a tracing step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from scrimp.chunks import Meter, Schedule, ScheduleStep, Slot, Store, detached
from scrimp.engine.step.phase import Mode, Phase, check_mode, check_transition
from scrimp.engine.step.timing import Timing


@dataclass(frozen=True, kw_only=True)
class SavedWeight:
    """What autograd saves in place of a weight: its location, not its values."""

    layer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Quietly:
    """Marks layer movement, which is not the model's doing. Not a generator, because it is entered several times per layer."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents

    def __enter__(self) -> None:
        self._before, self._residents.moving = self._residents.moving, True

    def __exit__(self, *_error: object) -> None:
        self._residents.moving = self._before


class Residents:
    """Keeps track of resident layers. It calls `retire(layer, slots)` when a layer's gradients are complete, and `check()` where
    the step may be interrupted."""

    def __init__(
        self,
        store: Store,
        meter: Meter,
        retire: Callable[[int, list[Slot]], None],
        check: Callable[[], None],
    ) -> None:
        self.store = store
        self.meter = meter
        self.step = 0
        self.phase = Phase.IDLE
        self.mode: Mode | None = None
        self.moving = False  # layers are being fetched or evicted: operators now are the engine's, not the model's
        self.trace: list[ScheduleStep] = []  # of this step; `room_nbytes` is the peak of everything but weights
        self.timing = Timing(store.device)
        self.kept_nbytes: dict[int, int] = {}  # activation bytes of each recomputed layer
        self._schedule: Schedule | None = None
        self._expected: tuple[tuple[int, ...], ...] = ()
        self._running: list[int] = []
        self._held: set[int] = set()  # recomputed, and backward is not done with them
        self._current: tuple[int, ...] = ()
        self._empty: tuple[int, ...] = ()
        self._aside = False
        self._ends: list[int] = []
        self._retire = retire
        self._check = check
        self._trained = [sum(slot.trainable and slot.held for slot in layer.slots) for layer in store.table.layers]
        self._frozen = [any(not slot.trainable and slot.held for slot in layer.slots) for layer in store.table.layers]
        self._arrived: dict[int, list[Slot]] = {}  # gradients that have overwritten their weights
        self._spent: list[int] = []  # retired, but this backward may still need their frozen weights
        self._gone: list[int] = []  # retired, perhaps still being copied to their tier
        self._by_storage = {flat.untyped_storage()._cdata: k for k, flat in enumerate(store.flats)}

    # Steps.

    def enter(self, phase: Phase) -> None:
        """Enter the next phase; an illegal transition is a bug, and raises."""
        check_transition(self.phase, phase)
        self.phase = phase
        if phase is Phase.IDLE:
            self.mode = None
        elif phase is Phase.BACKWARD:
            self.say(phase)
        if self.store.ledger.recording is not None:
            self.store.ledger.recording.phase = str(phase)

    @property
    def active(self) -> bool:
        """Inside a step or an evaluation."""
        return self.phase is not Phase.IDLE

    @property
    def tracing(self) -> bool:
        return self.mode is Mode.TRACE

    def begin_step(
        self, step: int, schedule: Schedule | None, expected: tuple[tuple[int, ...], ...] = (), *, metering: bool = True
    ) -> None:
        """Follow a schedule made for the `expected` schedule steps, or trace if there is none. `metering`: the meter measures
        each schedule step."""
        self.step = step
        still = not metering and all(map(self.store.anchored, range(len(self.store.flats))))
        self._schedule, self._expected = schedule, expected
        self.mode = Mode.STATIC if still else Mode.TRACE if schedule is None else Mode.FOLLOW
        check_mode(self.phase, self.mode)
        self.trace, self.kept_nbytes, self._current, self._ends = [], {}, (), []
        self.timing.begin(tracing=self.tracing)
        self._arrived = {}
        self.say(Phase.FORWARD)
        self.meter.reset_peak()

    def end_step(self) -> tuple[bool, list[ScheduleStep]]:
        """Returns whether the step traced, from its start or from where it left its schedule, and its schedule steps."""
        self.timing.pause()
        if self.mode is not Mode.STATIC:
            self._close_schedule_step()
        self._current = ()
        traced = self.tracing
        keeps = self._schedule.keeps if self._schedule is not None else ()
        for layer, resident in enumerate(self.store.resident):
            if resident and (self._trained[layer] or layer not in keeps):
                self.store.drop(layer)  # its weights are about to change, or the schedule does not keep it
        self._gone.clear()
        self._held.clear()
        self.mode = None
        return traced, [self._labelled(at) for at in range(len(self.trace))] if traced else self.trace

    def abandon(self) -> None:
        self._running.clear()
        self._held.clear()
        self._arrived.clear()
        self._spent.clear()
        self._gone.clear()
        self._current = ()
        self.mode = None
        for layer in range(len(self.store.resident)):
            self.store.drop(layer)

    def before_receiving(self, layer: int) -> None:
        """Fetch a layer so that its gradient can use its buffer. If the layer has just one gradient, only allocate the buffer."""
        if (
            self.mode is not Mode.STATIC and layer not in self._current
        ):  # even if it happens to be resident: schedule steps must not depend on that
            self.touch(layer, empty=self._trained[layer] == 1)

    def arrived(self, layer: int, slot: Slot) -> None:
        """A gradient has overwritten its weight. After a layer's last gradient, this backward needs its weights no more."""
        slots = self._arrived.setdefault(layer, [])
        slots.append(slot)
        if len(slots) == self._trained[layer]:
            self._finish(layer)

    def retire_rest(self) -> None:
        """After a backward: retire layers where some parameters got no gradient."""
        for layer in sorted(self._arrived):
            self._finish(layer)
        for layer in self._spent:
            self._end(layer)
        self._spent.clear()
        self._held.clear()

    def _finish(self, layer: int) -> None:
        self._retire(layer, sorted(self._arrived.pop(layer), key=lambda slot: slot.start))
        if self._frozen[layer] and torch._C._current_graph_task_id() != -1:
            self._spent.append(layer)
            return
        self._held.discard(layer)
        self._end(layer)

    def _end(self, layer: int) -> None:
        if self.store.anchored(layer):
            return
        self._ends.append(layer)
        self._gone.append(layer)
        if self.tracing:
            self._let_go(())

    def _let_go(self, stay: tuple[int, ...]) -> None:
        for layer in self._gone:
            if layer not in stay:
                self.store.drop(layer)
        self._gone = [layer for layer in self._gone if layer in stay]

    # Requests for layers.

    def run(self, layer: int, forward: Callable[[], Any]) -> Any:
        self._running.append(layer)
        try:
            self.touch(layer)
            return forward()
        finally:
            self._running.remove(layer)
            if torch._C._current_graph_task_id() != -1:  # a recomputation inside backward: needed until its gradients arrive
                self.hold(layer)

    def partly_frozen(self, layer: int) -> bool:
        return any(self._frozen[other] for other in self.store.table.layers[layer].needs)

    def hold(self, layer: int) -> None:
        """Keep a layer that was recomputed in backward, entirely or in part, until its gradients arrive."""
        self._held.update(self.store.table.layers[layer].needs)

    def frozen_done(self, layer: int) -> None:
        """Backward no longer needs the frozen weights of a layer."""
        for other in self.store.table.layers[layer].needs:
            if self._frozen[other]:
                self._held.discard(other)
            if other in self._spent:
                self._spent.remove(other)
                self._end(other)

    def touch(self, layer: int, *, empty: bool = False) -> None:
        """Fetch a layer and the weights it shares; or, if `empty`, only allocate its buffer."""
        self._check()
        if self.mode is Mode.STATIC:
            self._current = self.store.table.layers[layer].needs
            for other in self._current:
                self.store.arrived(other)
            return
        pinned = {other for running in self._running for other in self.store.table.layers[running].needs}
        needs = tuple(sorted({*self.store.table.layers[layer].needs} | pinned | self._held | {*self._arrived}))
        if needs == self._current and all(self.ready(other) for other in needs):
            return
        with self.quietly():
            self._begin_schedule_step(layer, needs, empty)

    def quietly(self) -> Quietly:
        return Quietly(self)

    def _begin_schedule_step(self, layer: int, needs: tuple[int, ...], empty: bool) -> None:
        bring = [other for other in needs if not (empty and other == layer)]
        if self._aside:
            self._current = needs
            self.store.ledger.when = f"in an evaluation, {self.place()}"
            self._drop_others(needs)
            self._bring(bring, layer)
            return
        self.timing.pause()
        self._close_schedule_step()
        self._current = needs
        self._empty = (layer,) if empty else ()
        self.say(self.phase)
        recording = self.store.ledger.recording
        if recording is not None:
            recording.enter(str(self.phase), needs)
        at = len(self.trace)
        if self._schedule is not None and (at >= len(self._expected) or self._expected[at] != needs):
            self._schedule, self.mode = None, Mode.TRACE  # the order differs from the schedule
        if self._schedule is not None:
            self._let_go(self._schedule.lingers[at])
            for other in self._schedule.drops[at]:
                self.store.drop(other)
        else:
            self._let_go(())
            self._drop_others(needs)
        self._bring(bring, layer)
        # No prefetch with several ranks: a gather is complete when it returns, so an early one saves no time. Its packing
        # buffers were not traced at this schedule step, and making room for them could evict the layer being fetched.
        if self._schedule is not None and self.store.wire.world == 1:
            for other in self._schedule.ahead[at]:
                self._fetch(other)
        if recording is not None:
            recording.hold(self.store.resident)
        self.timing.resume(backward=self.phase is Phase.BACKWARD)

    @property
    def following(self) -> bool:
        """The step follows a schedule made for it."""
        return self._schedule is not None

    def ready(self, layer: int) -> bool:
        """The current schedule step requested the layer, and it is resident. A layer that merely happens to be resident may
        still be in transfer, and schedule steps must not depend on that."""
        if self.mode is Mode.STATIC:
            return layer not in self.store.gates
        return layer in self._current and self.store.resident[layer] and layer not in self._gone

    def place(self) -> str:
        """Describes where the step is, for messages."""
        if self._current:
            return f"at layer {', '.join(self._name(layer) for layer in self._current)}"
        return f"before layer {self._name(0)}, the first" if self.store.flats else "between steps"

    def say(self, phase: str) -> None:
        """Tell the ledger the current phase and layer."""
        self.store.ledger.when = f"in step {self.step}, {phase} {self.place()}"

    def make_room(self) -> None:
        """Evict all layers that are not in use. Ranks that follow a schedule together evict none, because a rank that evicted a
        layer alone would have to gather it again alone."""
        self._let_go(())
        if self._schedule is not None and self.store.wire.world > 1:
            return
        for other, resident in enumerate(self.store.resident):
            if resident and other not in self._current and other not in self._arrived:
                self.store.drop(other)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For evaluation: keep only running layers resident, and record no trace."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False
            self._current = ()
            self._drop_others(())

    def saving(self) -> saved_tensors_hooks:
        """Makes autograd save handles in place of weights; unpacking a handle fetches the layer."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _drop_others(self, needs: tuple[int, ...]) -> None:
        for other, resident in enumerate(self.store.resident):
            if resident and other not in needs:
                self.store.drop(other)

    def _bring(self, bring: list[int], layer: int) -> None:
        missing = {other for other in (*bring, layer) if not self.store.resident[other]}
        self.meter.expect(sum(self.store.nbytes(other) for other in missing))
        for other in bring:
            self._fetch(other)
        for other in bring:
            self.store.arrived(other)
        if not self.store.resident[layer]:
            self.store.open(layer)

    def _fetch(self, layer: int) -> None:
        if layer in self._gone:  # its buffer holds gradients that are being copied to their tier
            self._gone.remove(layer)
            self.store.drop(layer)
        self.store.fetch(layer)

    def layer_of(self, tensor: torch.Tensor) -> int | None:
        """The layer whose storage a tensor uses. A sparse tensor has none."""
        if tensor.layout is not torch.strided:
            return None
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def kept(self, leaf: Any) -> Any:
        """Clones a weight that leaves the engine, because its storage is freed with its layer."""
        return leaf.clone() if isinstance(leaf, torch.Tensor) and self.layer_of(leaf) is not None else leaf

    def _pack(self, tensor: torch.Tensor) -> Any:
        layer = self.layer_of(tensor)
        if layer is None:
            self.meter.mark_saved(tensor)
            # Detached: an output saved with its graph would be a reference cycle, and survive a failed step.
            return detached(tensor), tensor._version
        return SavedWeight(layer=layer, size=tuple(tensor.shape), stride=tensor.stride(), offset=int(tensor.storage_offset()))

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedWeight):
            self.touch(packed.layer)
            return self.store.flats[packed.layer].as_strided(packed.size, packed.stride, packed.offset)
        tensor: torch.Tensor = packed[0]
        if tensor._version != packed[1]:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was modified by an inplace operation: it is at "
                f"version {tensor._version}, and version {packed[1]} was saved"
            )
        return tensor

    # Recording.

    def _close_schedule_step(self) -> None:
        if self._current:
            peak = self.meter.reset_peak()
            self.trace.append(ScheduleStep(needs=self._current, room_nbytes=peak, ends=tuple(self._ends), empty=self._empty))
            self._ends = []

    def _labelled(self, at: int) -> ScheduleStep:
        return replace(self.trace[at], label=f"schedule step {at} ({', '.join(map(self._name, self.trace[at].needs))})")

    def _name(self, layer: int) -> str:
        return self.store.table.layers[layer].path or "the model itself"
