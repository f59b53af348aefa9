"""Dense gradient exchange: gradients are averaged over the ranks, checked, and applied on the tier of their layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from scrimp._warnings import warn
from scrimp.checkpoint import Named
from scrimp.chunks import DEVICE, Slot, gradient_norm
from scrimp.engine.gradients.checkpoint import is_sparse
from scrimp.engine.update.grad_check import check_gradients
from scrimp.engine.update.update import restore_all

if TYPE_CHECKING:
    from scrimp.engine._training import Training


class DenseExchange:
    """Implements `Exchange` with averaged, full gradients."""

    def __init__(self) -> None:
        self._norms: dict[str, torch.Tensor] = {}  # of gradients, computed while they were on the device
        self._started: set[str] = set()  # parameters whose update has started
        self._scale: torch.Tensor | None = None

    def meet(self, engine: Training) -> None:
        """Dense exchange has no collective check."""

    def check(self) -> None:
        """Dense exchange does nothing in the background."""

    def begin(self, engine: Training) -> None:
        self._norms.clear()
        self._started.clear()

    @property
    def started(self) -> bool:
        """Some weight has changed, so the step cannot be undone."""
        return bool(self._started)

    def receive(self, engine: Training, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
        engine.residents.before_receiving(layer)
        engine.store.receive(layer, slot, gradient, first=first)

    def retire(self, engine: Training, layer: int, arrived: list[tuple[Slot, bool]]) -> None:
        """All of a layer's gradients of this micro-batch have arrived, each with whether it is the first of its slot."""
        engine.store.retire(layer, arrived)
        slots = [slot for slot, _ in arrived]
        if engine.must_check:
            if engine.wire.world == 1 and engine.micro_batches == 1 and not engine.store.anchored(layer):
                self._norms.update({slot.name: gradient_norm(engine.store.device_view(layer, slot)) for slot in slots})
        elif engine.residents.following and engine.current.last_part and engine.store.placements[layer].tier != DEVICE:
            self._start(engine, layer, slots)

    def _start(self, engine: Training, layer: int, slots: list[Slot]) -> None:
        """Start a layer's update while the backward goes on."""
        self._started.update(slot.name for slot in slots)
        updating = engine.updating
        updating.start(layer, slots, updating.numbers(slots, engine.counts), engine.steps, None)

    def finish(self, engine: Training) -> None:
        """After the last backward: check the gradients, then update, or restore the weights."""
        if self._passes_check(engine):
            rest = [place for place in engine.in_order() if place[1].name not in self._started]
            engine.updating.run(rest, engine.steps, engine.counts, self._scale)
        else:
            engine.skipped += 1
            restore_all(engine.store, engine.current.arrived.values())

    def give_up(self) -> None:
        """Abandon the step."""

    def saved(self, engine: Training) -> Iterable[Named]:
        """Tensors that a checkpoint needs in addition to those of the store: none."""
        return ()

    def load(self, engine: Training, files: list[Any]) -> None:
        """Warn if the checkpoint has residuals, which a dense exchange cannot use."""
        if is_sparse(files):
            words = "the checkpoint is of a run with sparse exchange: its residuals are dropped"
            warn(words)

    def close(self) -> None: ...

    def _checked(self, engine: Training) -> list[tuple[int, Slot]]:
        """The gradients whose norms are computed, in the same order on all ranks."""
        return engine.in_order()

    def _passes_check(self, engine: Training) -> bool:
        """Whether to update: all gradients are finite, if that is required. Sets the scale that clips the norm."""
        self._scale = None
        if not engine.must_check:
            return True
        scale, arrived = engine.loss_scale, self._checked(engine)
        try:
            check = check_gradients(engine.store, arrived, self._norms, clip=engine.clip_norm, loss_scale=scale.value)
        finally:
            self._norms.clear()
        scale.saw(finite=check.bad is None)
        engine.norm = check.norm
        if check.bad is not None and (engine.skip_nonfinite or scale.dynamic):
            if not scale.dynamic:
                words = f"step {engine.steps}: gradient of {check.bad} is not finite; the update is skipped"
                warn(words)
            return False
        self._scale = check.scale
        return True
