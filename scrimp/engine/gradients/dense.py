"""Gradients exchanged whole: averaged over the ranks on their way home, judged there, and updated where their home is."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from scrimp.checkpoint import Named
from scrimp.chunks import DEVICE, Slot, gradient_norm
from scrimp.engine.gradients.checkpoint import is_sparse
from scrimp.engine.update.grad_check import check_gradients
from scrimp.engine.update.update import restore_all

if TYPE_CHECKING:
    from scrimp.engine._training import Training


class DenseExchange:
    """What an engine asks, in the order of a step; it holds no engine, so that one goes when nobody holds it."""

    def __init__(self) -> None:
        self._norms: dict[str, torch.Tensor] = {}  # of gradients, taken on the device
        self._started: set[str] = set()  # updated already
        self._scale: torch.Tensor | None = None

    def meet(self, engine: Training) -> None:
        """What ranks say to each other before a step, once, however often it is tried."""

    def check(self) -> None:
        """Raise what went wrong beside the steps, if something did."""

    def begin(self, engine: Training) -> None:
        self._norms.clear()
        self._started.clear()

    @property
    def started(self) -> bool:
        """Something was changed that cannot be undone."""
        return bool(self._started)

    def receive(self, engine: Training, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
        engine.residents.before_receiving(layer)
        engine.store.receive(layer, slot, gradient, first=first)

    def retire(self, engine: Training, layer: int, arrived: list[tuple[Slot, bool]]) -> None:
        """All of a layer's gradients of this micro-batch are there, each with whether it is the first (or no more will come)."""
        engine.store.retire(layer, arrived)
        slots = [slot for slot, _ in arrived]
        if engine.must_check:
            if engine.wire.world == 1 and engine.micro_batches == 1 and not engine.store.anchored(layer):
                self._norms.update({slot.name: gradient_norm(engine.store.device_view(layer, slot)) for slot in slots})
        elif engine.residents.following and engine.last_part and engine.store.placements[layer].tier != DEVICE:
            self._started.update(slot.name for slot in slots)
            updating = engine.updating
            updating.start(layer, slots, updating.numbers(slots, engine.counts), engine.steps, None)

    def finish(self, engine: Training) -> None:
        """After the last backward: judge, then update or leave everything as it was."""
        if self._passes_check(engine):
            rest = [place for place in engine.in_order() if place[1].name not in self._started]
            engine.updating.run(rest, engine.steps, engine.counts, self._scale)
        else:
            engine.skipped += 1
            restore_all(engine.store, engine.arrived.values())

    def give_up(self) -> None:
        """The step is not made."""

    def saved(self, engine: Training) -> Iterable[Named]:
        """What a checkpoint must have besides the store."""
        return ()

    def load(self, engine: Training, files: list[Any]) -> None:
        """From the files of all ranks."""
        if is_sparse(files):
            words = "the checkpoint is of a run with sparse exchange: what its ranks had not sent yet is left out"
            warnings.warn(words, stacklevel=5)

    def close(self) -> None: ...

    def _passes_check(self, engine: Training) -> bool:
        """Whether to update: finite gradients, if that was asked for; sets the scale that clips the norm."""
        self._scale = None
        if not engine.must_check:
            return True
        scale = engine.loss_scale
        try:
            check = check_gradients(engine.store, engine.in_order(), self._norms, clip=engine.clip_norm, loss_scale=scale.value)
        finally:
            self._norms.clear()
        scale.saw(finite=check.bad is None)
        if check.bad is not None and (engine.skip_nonfinite or scale.dynamic):
            if not scale.dynamic:
                words = f"step {engine.steps}: gradient of {check.bad} is not finite; the update is skipped"
                warnings.warn(words, stacklevel=6)
            return False
        engine.norm, self._scale = check.norm, check.scale
        return True
