"""The model's forward without gradients, between steps, within the same budget."""

from __future__ import annotations

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
    with all_eval(engine.model):
        while True:
            try:
                return _once(engine, args, kwargs)
            except FitError as error:
                reason = error.bare()
            engine.residents.abandon()
            engine.ledger.reset_peak()
            if not engine.planning.homes_back():
                raise least_of_evaluation(engine, reason, partial(_trial, engine, args, kwargs))


def _once(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with running(engine, args, kwargs, engine.meter), torch.no_grad(), engine.residents.aside(), engine.strays:
        here, there = to_device(args, kwargs, engine.device, engine.input_dtype)
        return tree_map(engine.residents.kept, engine.model(*here, **there))


def _trial(engine: Engine, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Peaks:
    with torch.random.fork_rng(devices=[engine.device] if engine.device.type == "cuda" else []):
        try:
            _once(engine, args, kwargs)
            peak = engine.ledger.peak_nbytes
        finally:
            engine.residents.abandon()
            engine.ledger.reset_peak()
    return Peaks(device_nbytes=peak)
