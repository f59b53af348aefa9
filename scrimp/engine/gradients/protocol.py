"""The interface between an engine and a gradient exchange, in the order of a step. `DenseExchange` and `SparseExchange` have it.

An exchange holds no reference to the engine, so that an engine can be garbage-collected: every call gets the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from scrimp.checkpoint import Named
from scrimp.chunks import Slot

if TYPE_CHECKING:
    from scrimp.engine._training import Training


class Exchange(Protocol):
    def check(self) -> None:
        """Raise an error that happened in the background, if there was one."""

    def meet(self, engine: Training) -> None:
        """Run collective checks before a step, once, however often the step is retried."""

    def begin(self, engine: Training) -> None:
        """Before the first micro-batch."""

    @property
    def started(self) -> bool:
        """Some weight or residual has changed, so the step cannot be undone."""

    def receive(self, engine: Training, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
        """One gradient of one micro-batch, as autograd makes it; `first` of its parameter in this step."""

    def retire(self, engine: Training, layer: int, arrived: list[tuple[Slot, bool]]) -> None:
        """All gradients of a layer in this micro-batch have arrived, or no more will come."""

    def finish(self, engine: Training) -> None:
        """After the last backward: check the gradients, then update or skip."""

    def give_up(self) -> None:
        """Abandon the step."""

    def saved(self, engine: Training) -> Iterable[Named]:
        """Tensors that a checkpoint needs in addition to those of the store."""

    def load(self, engine: Training, files: list[Any]) -> None:
        """Restore from the checkpoint files of all ranks."""

    def close(self) -> None:
        """End all threads."""
