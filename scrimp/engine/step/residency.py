"""Which layers are on the device, moment by moment.

A moment begins when a layer is asked for that was not the last one: by its forward, by a recomputation, or by autograd
unpacking one of its weights. A tracing step holds just the layers that are running: that is the least, and it records the
moments with the most that everything else took in each. From that a schedule is made, and the steps after it follow it. A
step that asks in another order than its schedule goes on as a tracing step.
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
class Handle:
    """What autograd keeps of a weight: where it is, not what it is."""

    layer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Quietly:
    """Layers come and go inside. Not a generator: it is entered several times for every layer."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents

    def __enter__(self) -> None:
        self._before, self._residents.moving = self._residents.moving, True

    def __exit__(self, *_error: object) -> None:
        self._residents.moving = self._before


class Residents:
    """`retire(layer, slots)` is called when a layer's gradients are complete, `check()` where the step may be interrupted."""

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
        self.moving = False  # layers are coming and going: what is done to them now is not the model's doing
        self.trace: list[ScheduleStep] = []  # of this step; `room_nbytes` is what others took
        self.timing = Timing(store.device)
        self.kept_nbytes: dict[int, int] = {}  # what each recomputed layer's activations take
        self._schedule: Schedule | None = None
        self._expected: tuple[tuple[int, ...], ...] = ()
        self._running: list[int] = []
        self._held: set[int] = set()  # recomputed, and not yet through with backward
        self._current: tuple[int, ...] = ()
        self._empty: tuple[int, ...] = ()
        self._aside = False
        self._ends: list[int] = []
        self._retire = retire
        self._check = check
        self._trained = [sum(slot.trainable for slot in layer.slots) for layer in store.table.layers]
        self._frozen = [any(not slot.trainable for slot in layer.slots) for layer in store.table.layers]
        self._arrived: dict[int, list[Slot]] = {}  # gradients that stand where weights stood
        self._spent: list[int] = []  # retired, but their frozen weights may still be needed in this backward
        self._gone: list[int] = []  # retired, perhaps still being copied home
        self._by_storage = {flat.untyped_storage()._cdata: k for k, flat in enumerate(store.flats)}

    # Steps.

    def enter(self, phase: Phase) -> None:
        """From one phase to the next; an illegal transition is a bug, and raises."""
        check_transition(self.phase, phase)
        self.phase = phase
        if phase is Phase.IDLE:
            self.mode = None
        elif phase is Phase.BACKWARD:
            self.say(phase)

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
        """Follow a schedule made for the moments that are expected; or, without one, trace. `metering`: somebody wants to know
        what each moment takes."""
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
        """Whether the step traced, from its start or from where it left its schedule; and the moments."""
        self.timing.pause()
        if self.mode is not Mode.STATIC:
            self._close_step()
        self._current = ()
        traced = self.tracing
        keeps = self._schedule.keeps if self._schedule is not None else ()
        for layer, resident in enumerate(self.store.resident):
            if resident and (self._trained[layer] or layer not in keeps):
                self.store.drop(layer)  # its weights are about to change, or nobody planned for it
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
        """A gradient needs its layer's place on the device. If it is the only one of the layer, just the place."""
        if (
            self.mode is not Mode.STATIC and layer not in self._current
        ):  # whether it happens to be there or not: moments must not depend on that
            self.touch(layer, empty=self._trained[layer] == 1)

    def arrived(self, layer: int, slot: Slot) -> None:
        """A gradient has taken its weight's place; with a layer's last one its weights are through for this backward."""
        slots = self._arrived.setdefault(layer, [])
        slots.append(slot)
        if len(slots) == self._trained[layer]:
            self._finish(layer)

    def retire_rest(self) -> None:
        """After a backward: layers some of whose parameters got no gradient."""
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

    # Asking for layers.

    def run(self, layer: int, forward: Callable[[], Any]) -> Any:
        self._running.append(layer)
        try:
            self.touch(layer)
            return forward()
        finally:
            self._running.remove(layer)
            if torch._C._current_graph_task_id() != -1:  # a recomputation inside backward: needed until its gradients land
                self.hold(layer)

    def partly_frozen(self, layer: int) -> bool:
        return any(self._frozen[other] for other in self.store.table.layers[layer].needs)

    def hold(self, layer: int) -> None:
        """Recomputed in backward, if only a part of it: needed until its gradients land."""
        self._held.update(self.store.table.layers[layer].needs)

    def streamed(self, layer: int) -> None:
        """Backward needs the frozen weights of a layer no more."""
        for other in self.store.table.layers[layer].needs:
            if self._frozen[other]:
                self._held.discard(other)
            if other in self._spent:
                self._spent.remove(other)
                self._end(other)

    def touch(self, layer: int, *, empty: bool = False) -> None:
        """Bring a layer and what it shares; or, `empty`, make room for the layer without its weights."""
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
            self._begin_step(layer, needs, empty)

    def quietly(self) -> Quietly:
        return Quietly(self)

    def _begin_step(self, layer: int, needs: tuple[int, ...], empty: bool) -> None:
        bring = [other for other in needs if not (empty and other == layer)]
        if self._aside:
            self._current = needs
            self.store.ledger.when = f"in an evaluation, {self.place()}"
            self._drop_others(needs)
            self._bring(bring, layer)
            return
        self.timing.pause()
        self._close_step()
        self._current = needs
        self._empty = (layer,) if empty else ()
        self.say(Phase.FORWARD if torch._C._current_graph_task_id() == -1 else Phase.BACKWARD)
        at = len(self.trace)
        if self._schedule is not None and (at >= len(self._expected) or self._expected[at] != needs):
            self._schedule, self.mode = None, Mode.TRACE  # another order than expected
        if self._schedule is not None:
            self._let_go(self._schedule.lingers[at])
            for other in self._schedule.drops[at]:
                self.store.drop(other)
        else:
            self._let_go(())
            self._drop_others(needs)
        self._bring(bring, layer)
        # Not among several ranks: a gather is over when it returns, so an early one saves no time, and what it packs was
        # not traced with this moment; making room for that would take the very layer that is coming.
        if self._schedule is not None and self.store.wire.world == 1:
            for other in self._schedule.ahead[at]:
                self._fetch(other)
        self.timing.resume(backward=torch._C._current_graph_task_id() != -1)

    @property
    def following(self) -> bool:
        """A schedule that was made for just this."""
        return self._schedule is not None

    def ready(self, layer: int) -> bool:
        """It was asked for in this moment, and is there. One that only happens to be there may still be on its way; and
        moments must not depend on that."""
        if self.mode is Mode.STATIC:
            return layer not in self.store.gates
        return layer in self._current and self.store.resident[layer] and layer not in self._gone

    def place(self) -> str:
        """Where the step is, in words."""
        if self._current:
            return f"at layer {', '.join(self._name(layer) for layer in self._current)}"
        return f"before layer {self._name(0)}, the first" if self.store.flats else "between steps"

    def say(self, phase: str) -> None:
        """Tell the ledger when it is."""
        self.store.ledger.when = f"in step {self.step}, {phase} {self.place()}"

    def make_room(self) -> None:
        """Let go of everything that nobody is using. Not among ranks that follow a schedule: what one of them dropped alone
        it would have to gather again alone."""
        self._let_go(())
        if self._schedule is not None and self.store.wire.world > 1:
            return
        for other, resident in enumerate(self.store.resident):
            if resident and other not in self._current and other not in self._arrived:
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
            self._drop_others(())

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
            self._fetch(other)
        for other in bring:
            self.store.arrived(other)
        if not self.store.resident[layer]:
            self.store.open(layer)

    def _fetch(self, layer: int) -> None:
        if layer in self._gone:  # what is there are its gradients, on their way home
            self._gone.remove(layer)
            self.store.drop(layer)
        self.store.fetch(layer)

    def layer_of(self, tensor: torch.Tensor) -> int | None:
        """The layer whose storage a tensor is of. A sparse tensor has none."""
        if tensor.layout is not torch.strided:
            return None
        return self._by_storage.get(tensor.untyped_storage()._cdata)

    def kept(self, leaf: Any) -> Any:
        """For what leaves the engine: a weight that was handed out would go with its layer."""
        return leaf.clone() if isinstance(leaf, torch.Tensor) and self.layer_of(leaf) is not None else leaf

    def _pack(self, tensor: torch.Tensor) -> Any:
        layer = self.layer_of(tensor)
        if layer is None:
            self.meter.mark_saved(tensor)
            # Detached: an output that is saved with its graph would be a cycle, and outlive a failed step.
            return detached(tensor), tensor._version
        return Handle(layer=layer, size=tuple(tensor.shape), stride=tensor.stride(), offset=int(tensor.storage_offset()))

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Handle):
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

    def _close_step(self) -> None:
        if self._current:
            peak = self.meter.reset_peak()
            self.trace.append(ScheduleStep(needs=self._current, room_nbytes=peak, ends=tuple(self._ends), empty=self._empty))
            self._ends = []

    def _labelled(self, at: int) -> ScheduleStep:
        return replace(self.trace[at], label=f"moment {at} ({', '.join(map(self._name, self.trace[at].needs))})")

    def _name(self, layer: int) -> str:
        return self.store.table.layers[layer].path or "the model itself"
