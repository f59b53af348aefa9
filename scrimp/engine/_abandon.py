"""Undoing a step that failed before its update: weights again where gradients stood, nothing of the graph left."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from scrimp.engine._updating import restore_all

if TYPE_CHECKING:
    from scrimp.engine._engine import Engine


def abandon(engine: Engine) -> None:
    engine.undo.clear()
    gc.collect()  # graphs that failed half-way are cycles
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    for parameter in engine.weights.values():
        parameter.grad = None
    engine.exchanging.give_up()
    engine.residents.abandon()
    engine.store.lanes.settle()
    try:
        restore_all(engine.store, engine.landed.values())
    except BaseException as error:
        engine.broken = f"step {engine.steps} failed, and so did undoing it ({error})"
        raise
    if engine.pending and not engine._part_landed:
        engine.ledger.reset_peak()
        return  # this micro-batch changed nothing: the sum of those before it is whole
    engine.landed.clear()
    engine.pending = 0
    engine.ledger.reset_peak()
