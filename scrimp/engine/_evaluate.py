"""The model's forward, or any function that uses the model, without gradients: between steps, within the same budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from scrimp.engine._batch import to_device
from scrimp.engine._least import Peaks, least_of_evaluation
from scrimp.engine._modes import all_eval
from scrimp.engine._running import running
from scrimp.errors import FitError

if TYPE_CHECKING:
    from scrimp.engine._engine import Engine


def evaluate(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    run = partial(_once, engine, *which(engine, args), kwargs)
    engine.undo.begin(tracing=False)
    with all_eval(engine.model):
        while True:
            try:
                out = run()
                engine.undo.done(tracing=False)
                return out
            except FitError as error:
                reason = error.bare()
            engine.residents.abandon()
            engine.ledger.reset_peak()
            engine.undo.back()  # the function starts again, and may draw random numbers
            if not engine.planning.homes_back():
                raise least_of_evaluation(engine, reason, partial(_trial, engine, run))


def _once(engine: Engine, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with running(engine, args, kwargs, engine.meter), torch.no_grad(), engine.residents.aside(), engine.strays:
        here, there = to_device(args, kwargs, engine.device, engine.input_dtype)
        return tree_map(engine.residents.kept, function(*here, **there))


def _trial(engine: Engine, run: Callable[[], Any]) -> Peaks:
    try:
        run()
        peak = engine.ledger.peak_nbytes
    finally:
        engine.residents.abandon()
        engine.ledger.reset_peak()
        engine.undo.back()
    return Peaks(device_nbytes=peak)


def which(engine: Engine, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function to run and its arguments: a first argument that can be called, or else the model."""
    if args and callable(args[0]):
        return args[0], args[1:]
    return engine.model, args
