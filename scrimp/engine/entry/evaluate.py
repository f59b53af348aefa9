"""`engine.evaluate`: runs the model's forward, or a function that uses the model, without gradients and within the budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from scrimp.engine.entry.least_budget import Peaks, least_of_evaluation
from scrimp.engine.step.batch import to_device, which
from scrimp.engine.step.context import all_eval, running
from scrimp.engine.step.phase import Phase
from scrimp.errors import FitError

if TYPE_CHECKING:
    from scrimp.engine._training import Training


def evaluate(engine: Training, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    run = partial(_once, engine, *which(engine.model, args), kwargs)
    engine.rollback.begin(tracing=False)
    with all_eval(engine.model):
        while True:
            try:
                out = run()
                engine.rollback.done(tracing=False)
                return out
            except FitError as error:
                reason = error.bare()
            engine.residents.abandon()
            engine.ledger.reset_peak()
            engine.rollback.back()  # restore the random state too, because the function starts again
            if not engine.planning.placements_back():
                raise least_of_evaluation(engine, reason, partial(_trial, engine, run))


def _once(engine: Training, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with (
        running(engine, args, kwargs, Phase.EVALUATE, engine.meter),
        torch.no_grad(),
        engine.residents.aside(),
        engine.passes.evaluating(engine) as kept,
    ):
        here, there = to_device(args, kwargs, engine.device, engine.input_dtype)
        return tree_map(kept, function(*here, **there))


def _trial(engine: Training, run: Callable[[], Any]) -> Peaks:
    try:
        run()
        peak = engine.ledger.peak_nbytes
    finally:
        engine.residents.abandon()
        engine.ledger.reset_peak()
        engine.rollback.back()
    return Peaks(device_nbytes=peak)
