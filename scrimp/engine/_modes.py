"""Train and eval modes are the user's: a step runs the model in those it finds, as a plain loop does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
