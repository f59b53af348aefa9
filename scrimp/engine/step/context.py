"""Contexts in which the model runs: weights in place, a metered batch, and the train or eval mode of each module.

A step does not change the mode of any module, just as a plain training loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from scrimp._warnings import warn
from scrimp.chunks import ScheduleStep, Slot
from scrimp.engine.setup.special_modules import refuse_compiled
from scrimp.engine.step.phase import Phase
from scrimp.errors import FitError

if TYPE_CHECKING:
    from scrimp.engine._training import Training


@dataclass
class StepContext:
    """One training step while it runs. Calls of `engine.backward` share one context until `engine.update`."""

    arrived: dict[str, tuple[int, Slot]] = field(default_factory=dict)  # gradients, by parameter: layer and slot
    part_arrived: set[str] = field(default_factory=set)  # gradients of the micro-batch that runs
    last_part: bool = False  # the last micro-batch runs
    trace: list[ScheduleStep] | None = None  # of the last forward and backward, if they were traced
    traffic: tuple[int, ...] = ()  # counters of the store when the last forward began

    def begin(self, traffic: tuple[int, ...]) -> None:
        """Before a forward: of a step's first micro-batch, or of a call of `engine.backward`."""
        self.part_arrived, self.traffic = set(), traffic


@contextmanager
def running(engine: Training, args: Any, kwargs: Any, phase: Phase, metered: AbstractContextManager[object]) -> Iterator[None]:
    refuse_compiled(engine.model)
    batch = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    with engine.meta_parameters.away(), metered:
        engine.residents.enter(phase)
        for tensor in batch:
            engine.meter.lend(tensor)
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            words = f"step {engine.steps}: {error}; the ledger has {engine.ledger.snapshot()}"
            raise FitError(words, tier="device") from error
        finally:
            engine.residents.enter(Phase.IDLE)
            for tensor in batch:
                engine.meter.forget(tensor)


@contextmanager
def all_eval(model: nn.Module) -> Iterator[None]:
    """Puts all modules in eval mode, then restores the mode of each."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def warn_of_eval(model: nn.Module, step: int) -> None:
    """Warns if the whole model is in eval mode, as libraries often return it. A submodule in eval mode is intentional."""
    if step == 0 and not model.training:
        warn("the model is trained in eval mode: without dropout; call model.train() if that is not intended")
