"""Computes a step's gradients within the budget: a failed attempt is undone, and the next one takes less memory.

attempt = look up the plan for this batch shape; forward and backward
    fits        -> the gradients have arrived, and nothing is updated yet
    FitError    -> undo; evict layers, keep no activations, offload inputs; then find the least budget and raise
    StepAgain   -> undo; retry, because the engine has learned something about the model
    other error -> undo, and raise
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from scrimp.engine.entry.least_budget import least_of_step
from scrimp.engine.setup.process_groups import share_buffers
from scrimp.engine.step.abandon import StepAgain, abandon
from scrimp.engine.step.batch import Signature
from scrimp.errors import FitError, MoveError, RunError

if TYPE_CHECKING:
    from scrimp.engine._training import Training
    from scrimp.engine.schedule.planned import Planned


def compute_gradients(
    engine: Training, key: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Planned, torch.Tensor]:
    """Gradients of a whole batch in `micro_batches` parts, or of one part that joins the `pending` ones."""
    try:
        if not engine.pending:
            share_buffers(engine.wire, engine.model)
            engine.exchanging.meet(engine)
    except MoveError as error:
        raise engine.named_error(error) from error
    reason: FitError | None
    while True:
        try:
            plan = engine.planning.prepare(key)
        except MoveError as error:
            raise engine.named_error(error) from error
        engine.rollback.begin(tracing=plan.choice is None)
        engine.residents.timing.typical = engine.planning.typical
        try:
            loss = engine.run_micro_batches(plan, args, kwargs)
            break
        except FitError as error:
            # No weight has changed yet, so a retry with less memory is possible. But only after this clause: the error and
            # its cause hold the frames, which hold the activations that did not fit.
            reason = error.bare()
        except StepAgain as known:
            reason, words, unfit = None, str(known), known.unfit
        except BaseException:
            _no_way_back(engine)
            abandon(engine)
            engine.rollback.back()
            raise
        if _no_way_back(engine):
            raise reason or RunError(f"step {engine.steps}: {words}, and some layers had been updated already")
        abandon(engine)
        engine.rollback.back()
        if reason is None:
            engine.planning.never_again(unfit, words)
        elif not engine.passes.retries:  # other pipeline stages wait for this one, and would not try again
            raise reason
        elif not engine.planning.spare(plan):
            recomputable = engine.recompute.recomputable
            reason = least_of_step(engine, reason, plan, args, kwargs)
            if engine.recompute.recomputable == recomputable:  # else the trial found a variant that was not tried yet
                raise reason
    engine.rollback.done(tracing=plan.choice is None)
    engine.residents.timing.end()
    return plan, loss


def _no_way_back(engine: Training) -> bool:
    if engine.exchanging.started:
        engine.broken = f"step {engine.steps} failed when some layers had been updated"
    return engine.exchanging.started
