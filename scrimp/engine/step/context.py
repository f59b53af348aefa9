"""What surrounds the model while it runs: weights in place, a metered batch, and the train or eval mode of each module.

A step runs the model in the modes it finds, as a plain loop does: they are the user's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from scrimp.engine.setup.special_modules import refuse_compiled
from scrimp.engine.step.phase import Phase
from scrimp.errors import FitError

if TYPE_CHECKING:
    from scrimp.engine._training import Training


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
    """Everything in eval mode, then each module again in its own."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def warn_of_eval(model: nn.Module, step: int) -> None:
    """Models from a library often come in eval mode; submodules in it, a frozen BatchNorm, are meant so."""
    if step == 0 and not model.training:
        warnings.warn(
            "the model is trained in eval mode: without dropout; call engine.model.train() if not meant so", stacklevel=4
        )
