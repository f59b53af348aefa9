"""Gradient accumulation over several calls: `engine.backward(*micro_batch)`, again and again, then `engine.update()`.

The gradients of a call are added to those before it, and wait at home. Nothing is updated before `update`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import torch

from scrimp.chunks import ScheduleStep
from scrimp.engine.entry.rank_calls import called, explained, same_settings
from scrimp.engine.step.attempts import gradients
from scrimp.engine.step.batch import signature
from scrimp.engine.step.context import warn_of_eval
from scrimp.engine.step.interrupts import Interrupts, in_one_piece
from scrimp.engine.update.update import restore_all
from scrimp.errors import RunError

if TYPE_CHECKING:
    from scrimp.engine._training import Training
    from scrimp.engine.schedule.planning import Planned


class Accumulating:
    """A part of Engine."""

    interrupts: Interrupts
    pending = 0  # calls of backward since the last update
    accumulating = False  # a call of backward runs
    _lost = ""  # why gradients that were there are not any more
    _traces: list[tuple[Planned, list[ScheduleStep] | None, dict[int, int]]]  # of each call: plan, moments, bytes of activations

    @property
    def _all(self) -> Training:
        return cast("Training", self)

    @in_one_piece
    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The gradients of one micro-batch, added to those since the last `engine.update()`; its loss, detached. As in a
        plain loop with `(loss / micro_batches).backward()`: N calls and an update are one `step` of Engine(micro_batches=N) with
        the N micro-batches as its batch. Up to `micro_batches` calls for one update; after fewer the sum is still divided by
        `micro_batches`. A call that fails before its first gradient is as if it had not been made. One that fails later loses
        the gradients of all calls since the last update, and no weight has changed."""
        engine, before = self._all, self.pending
        self._check()
        called(engine, "backward")
        engine.check_usable()
        warn_of_eval(engine.model, engine.steps)
        engine.planning.checked = True  # no update begins before `update`
        engine.planning.call = [*engine.calls.row, 0]
        if not before:
            self._lost, self._traces = "", []
        self.accumulating = engine.store.pending = True
        try:
            with explained(engine):
                # Not the shape of a step's batch: a step has `micro_batches` parts one after the other.
                plan, loss = gradients(engine, (("backward", ()), *signature(args, kwargs)), args, kwargs)
        except BaseException as error:
            if before and not self.pending:
                self._lost = f"engine.backward call {before + 1} failed when it had gradients ({type(error).__name__})"
                error.add_note(f"scrimp: the gradients of {before} earlier engine.backward calls went with it; no weight changed")
            engine.store.pending = bool(self.pending)
            raise
        finally:
            self.accumulating = False
        self.pending = before + 1
        self._traces.append((plan, engine.trace, engine.residents.kept_nbytes))
        return loss

    @in_one_piece
    def update(self) -> None:
        """Update with the gradients of all calls of `backward` since the last one: clipped and judged as in a step."""
        called(self._all, "update")
        with explained(self._all):
            self._update()

    def _update(self) -> None:
        engine, start = self._all, time.perf_counter()
        engine.check_usable()
        if not self.pending:
            why = f": {self._lost}" if self._lost else ""
            raise RunError(f"engine.update() has no gradients{why}; call engine.backward(*batch) first")
        engine.rules.begin(engine.steps, engine.optimizer.now(engine.steps))
        same_settings(engine.wire.every(torch.tensor([engine.rules.digest(engine.steps)])))
        self.pending, engine.store.pending = 0, False
        engine.finish()
        for plan, trace, kept_nbytes in self._traces:
            engine.planning.use(plan)
            engine.residents.kept_nbytes = kept_nbytes
            engine.planning.learn(plan, trace, engine.residents)
        engine.seconds = time.perf_counter() - start
        engine.host_seconds = engine.updating.waited()

    def discard(self) -> None:
        """Without an update: what is pending is lost, and weights are again where gradients stood."""
        engine = self._all
        self._lost = f"those of {self.pending} engine.backward calls were discarded" if self.pending else self._lost
        self.pending, engine.store.pending = 0, False
        restore_all(engine.store, engine.arrived.values())
        engine.arrived.clear()

    def _check(self) -> None:
        engine = self._all
        if engine.store.sparse:
            raise RunError(
                "engine.backward with Sparse is not possible: what a rank sends is chosen in the backward of the last "
                "micro-batch, and nobody knows here which is the last; use Engine(micro_batches=N) and engine.step(*batch), "
                "which splits the batch"
            )
        if self.pending >= engine.micro_batches:
            place = (
                "has no place to add gradients up"
                if engine.micro_batches == 1
                else f"divides each loss by {engine.micro_batches}"
            )
            raise RunError(
                f"engine.backward was called {self.pending} times since the last update, and Engine(micro_batches="
                f"{engine.micro_batches}) {place}: call engine.update(), or build Engine(micro_batches={self.pending + 1}) or "
                "more"
            )
