"""Gradient accumulation over several calls: `engine.backward(*micro_batch)`, repeatedly, then `engine.update()`.

Each call adds its gradients to the accumulated ones, which stay on the tier of their layer. Nothing is updated before `update`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import torch

from scrimp.chunks import ScheduleStep
from scrimp.engine.entry.rank_calls import begin_call, naming_calls, same_settings
from scrimp.engine.step.attempts import compute_gradients
from scrimp.engine.step.batch import signature
from scrimp.engine.step.context import warn_of_eval
from scrimp.engine.step.interrupts import Interrupts, in_one_piece
from scrimp.engine.update.update import restore_all
from scrimp.errors import RunError

if TYPE_CHECKING:
    from scrimp.engine._training import Training
    from scrimp.engine.schedule.planned import Planned


class Accumulating:
    """Mixin of `Training`. `Engine` documents each call."""

    interrupts: Interrupts
    pending = 0  # calls of backward since the last update
    accumulating = False  # a call of backward runs
    _lost = ""  # why accumulated gradients were discarded
    _traces: list[tuple[Planned, list[ScheduleStep] | None, dict[int, int]]]  # of each call: plan, steps, bytes of activations

    @property
    def _all(self) -> Training:
        return cast("Training", self)

    @in_one_piece
    def backward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        engine, before = self._all, self.pending
        self._check()
        begin_call(engine, "backward")
        engine.check_usable()
        warn_of_eval(engine.model, engine.steps)
        engine.planning.checked = True  # no update begins before `update`
        engine.planning.call = [*engine.calls.row, 0]
        if not before:
            self._lost, self._traces = "", []
        self.accumulating = engine.store.pending = True
        try:
            with naming_calls(engine):
                # The key differs from that of a step's batch, because a step runs `micro_batches` parts in a row.
                plan, loss = compute_gradients(engine, (("backward", ()), *signature(args, kwargs)), args, kwargs)
        except BaseException as error:
            if before and not self.pending:
                self._lost = f"engine.backward call {before + 1} failed when it had gradients ({type(error).__name__})"
                error.add_note(f"scrimp: the gradients of {before} earlier engine.backward calls went with it; no weight changed")
            engine.store.pending = bool(self.pending)
            raise
        finally:
            self.accumulating = False
        self.pending = before + 1
        self._traces.append((plan, engine.current.trace, engine.residents.kept_nbytes))
        return loss

    @in_one_piece
    def update(self) -> None:
        self._check_by_hand("update")
        begin_call(self._all, "update")
        with naming_calls(self._all):
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

    @in_one_piece
    def zero_grad(self) -> None:
        begin_call(self._all, "zero_grad")
        if self.pending:
            self.discard()
        self._lost = ""

    def discard(self) -> None:
        """Drop the accumulated gradients without an update, and restore the weights that they overwrote."""
        engine = self._all
        self._lost = f"those of {self.pending} engine.backward calls were discarded" if self.pending else self._lost
        self.pending, engine.store.pending = 0, False
        restore_all(engine.store, engine.current.arrived.values())
        engine.current.arrived.clear()

    def _check_by_hand(self, call: str) -> None:
        if self._all.passes.by_hand:
            raise RunError(f"engine.{call} {self._all.passes.by_hand}")

    def _check(self) -> None:
        engine = self._all
        self._check_by_hand("backward")
        if engine.store.sparse:
            raise RunError(
                "engine.backward with Sparse is not possible: a rank selects what it sends in the backward of the last "
                "micro-batch, and engine.backward does not know which is the last; use Engine(micro_batches=N) and "
                "engine.step(*batch), which splits the batch"
            )
        if self.pending >= engine.micro_batches and (engine.micro_batches == 1 or engine.reduction == "mean"):
            place = (
                "has no buffer to accumulate gradients in"
                if engine.micro_batches == 1
                else f"divides each loss by {engine.micro_batches}"
            )
            raise RunError(
                f"engine.backward was called {self.pending} times since the last update, and Engine(micro_batches="
                f"{engine.micro_batches}) {place}: call engine.update(), or build Engine(micro_batches={self.pending + 1}) or "
                "more"
            )
