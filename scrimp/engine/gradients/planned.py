"""Gradients under a plan: the lowered program has reduced them already, each to the share that this rank accumulates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from scrimp.chunks import DEVICE, Slot
from scrimp.engine.gradients.dense import DenseExchange

if TYPE_CHECKING:
    from scrimp.engine._training import Training


class PlannedExchange(DenseExchange):
    """A dense exchange that communicates where the plan says: as gradients arrive, or once after the last micro-batch."""

    def receive(self, engine: Training, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
        engine.store.take(layer, slot, gradient, first=first)

    def retire(self, engine: Training, layer: int, arrived: list[tuple[Slot, bool]]) -> None:
        slots = [slot for slot, _ in arrived]
        weights = engine.under_plan.weights
        early = not engine.must_check and engine.residents.following and engine.current.last_part
        if early and engine.store.placements[layer].tier != DEVICE and not any(weights.later(slot.name) for slot in slots):
            self._start(engine, layer, slots)

    def _checked(self, engine: Training) -> list[tuple[int, Slot]]:
        """All trained parameters: ranks of another pipeline stage have gradients of others, and norms are added by position."""
        every = engine.in_order(every=True)
        absent = (slot.name for _, slot in every if slot.name not in engine.current.arrived)
        self._norms.update({name: torch.zeros(()) for name in absent})
        return every

    def finish(self, engine: Training) -> None:
        engine.under_plan.weights.complete([slot.name for _, slot in engine.in_order()])
        before = engine.skipped
        super().finish(engine)
        if engine.skipped == before:
            engine.under_plan.weights.updates += 1
