"""The model's forward, or any function that uses the model, without gradients: between steps, within the same budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from scrimp.engine._batch import to_device
from scrimp.engine._modes import all_eval
from scrimp.engine._running import running
from scrimp.engine._undo import Undo
from scrimp.errors import FitError

if TYPE_CHECKING:
    from scrimp.engine._engine import Engine


def evaluate(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    function, args = which(engine, args)
    undo = Undo(engine.model, engine.device)
    undo.begin(tracing=True)
    with all_eval(engine.model):
        while True:
            try:
                with running(engine, args, kwargs, engine.meter), torch.no_grad(), engine.residents.aside(), engine.strays:
                    here, there = to_device(args, kwargs, engine.device, engine.input_dtype)
                    return tree_map(engine.residents.kept, function(*here, **there))
            except FitError as error:
                reason = FitError(*error.args)
            engine.residents.abandon()
            engine.ledger.reset_peak()
            if not engine.planning.homes_back():
                raise reason
            undo.back()  # the function starts again, and may draw random numbers


def which(engine: Engine, args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function to run and its arguments: a first argument that can be called, or else the model."""
    if args and callable(args[0]):
        return args[0], args[1:]
    return engine.model, args
