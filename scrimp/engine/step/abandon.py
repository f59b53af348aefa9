"""Undoes a step that failed before its update: restores weights that gradients overwrote, and frees the autograd graph.

torch keeps the nodes that a failed backward did not run in a queue of the calling thread, and with them the graph and its
activations, until another backward removes them.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from scrimp.engine.update.update import restore_all

if TYPE_CHECKING:
    from scrimp.engine._training import Training


class StepAgain(Exception):  # noqa: N818
    """Not an error: the engine undoes the step and runs it again. `unfit` is a layer that must not be recomputed."""

    def __init__(self, words: str, unfit: int | None = None) -> None:
        super().__init__(words)
        self.unfit = unfit


class Leftovers:
    """Clears that queue. torch runs it from the newest node to the oldest, so the backward of a node that is older than the step
    removes everything that the step left."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Make the old node. Call this before a step's first operator, in the thread that runs its backward."""
        with torch.enable_grad():
            self._oldest = torch.empty(0, requires_grad=True).clone()  # takes no memory

    def clear(self) -> None:
        torch.autograd.backward(self._oldest, torch.empty(0), retain_graph=True)


def abandon(engine: Training) -> None:
    engine.rollback.clear()
    gc.collect()  # a graph that failed half-way is a reference cycle
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()
    for parameter in engine.weights.values():
        parameter.grad = None
    engine.exchanging.give_up()
    engine.residents.abandon()
    engine.store.copy_streams.settle()
    try:
        restore_all(engine.store, engine.current.arrived.values())
    except BaseException as error:
        engine.broken = f"step {engine.steps} failed, and so did undoing it ({error})"
        raise
    if engine.pending and not engine.current.part_arrived:
        engine.ledger.reset_peak()
        return  # this micro-batch changed nothing, so the accumulated gradients are intact
    engine.current.arrived.clear()
    engine.pending = 0
    engine.ledger.reset_peak()
