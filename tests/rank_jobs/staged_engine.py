"""Training under a plan with pipeline stages on real ranks: what an engine does besides stepping."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from scrimp import Engine, Memory, Plan, RunError, zoo
from scrimp.engine.lowered.weights import EngineWeights
from scrimp.errors import FitError
from tests.rank_jobs.planned_engine import engine_of, stepped


def holds(plan: str, name: str, settings: dict[str, Any], rows: int) -> dict[str, int]:
    """The elements of each weight that this rank holds after a step."""
    engine = engine_of(plan, name, settings)
    stepped(engine, name, settings, rows, 0)
    return {slot.name: slot.numel for layer in engine._run.store.table.layers for slot in layer.slots}


def tied(plan: str, name: str, settings: dict[str, Any], rows: int, steps: int, weight: str) -> torch.Tensor | None:
    """A weight after some steps, by the ranks of this stage alone; None if the stage does not hold it."""
    engine = engine_of(plan, name, settings)
    for step in range(steps):
        stepped(engine, name, settings, rows, step)
    passes = engine._run.under_plan
    if weight not in passes.program.part.rest:
        return None
    with torch.no_grad():
        return EngineWeights.whole(passes.weights, weight).clone()


def reads(plan: str, name: str, settings: dict[str, Any], rows: int, edited: str) -> dict[str, Any]:
    """What every rank reads: outputs of the model at another batch size before and after a step, what is on the device before and
    after, the state, and a parameter that was doubled in place."""
    engine = engine_of(plan, name, settings)
    tokens, now = zoo.example_batch(name, 3, **settings)[0], [dict(engine.ledger.now)]
    outputs = [engine.evaluate(tokens).clone()]
    stepped(engine, name, settings, rows, 0)
    outputs.append(engine.evaluate(tokens).clone())
    now.append(dict(engine.ledger.now))
    before = dict(engine.iter_state())
    with engine.full_parameters(edited) as model:
        model.get_parameter(edited).data.mul_(2)
    after = dict(engine.iter_state())
    return {"outputs": outputs, "now": now, "before": before, "after": after, "saved": {*engine.state_dict()}}


def poisoned(plan: str, name: str, settings: dict[str, Any], rows: int, rank: int) -> tuple[int, str, float, float | None]:
    """A step where one rank's weight is not a number: skipped steps, the warning; the loss and the norm after it is mended."""
    engine = engine_of(plan, name, settings)
    store = engine._run.store
    layer, slot = next((k, s) for k, each in enumerate(store.table.layers) for s in each.slots if s.trainable and s.numel)
    good = store.placements[layer].weights[slot.start].clone()
    if dist.get_rank() == rank:
        store.placements[layer].weights[slot.start] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stepped(engine, name, settings, rows, 0)
    if dist.get_rank() == rank:
        store.placements[layer].weights[slot.start] = good
    loss = stepped(engine, name, settings, rows, 0)
    return engine.optimizer.skipped, str(caught[0].message) if caught else "", loss, engine.optimizer.norm


def tiered(
    plan: str, name: str, settings: dict[str, Any], rows: int, steps: int, share: float, disk: str | None
) -> tuple[list[float], list[str], int]:
    """Steps with a budget of a share of this stage's peak: the losses, the tiers of layers with weights here, and the peak."""
    found = Plan.from_json(plan)
    assert found.schedule is not None
    nbytes = int(share * min(stage.memory.peak_nbytes for stage in found.schedule.stages))
    engine = engine_of(plan, name, settings, memory=Memory(device=nbytes, disk=disk))
    losses = [stepped(engine, name, settings, rows, step) for step in range(steps)]
    store = engine._run.store
    tiers = [str(placement.tier) for k, placement in enumerate(store.placements) if store.table.layers[k].numel]
    return losses, tiers, engine.ledger.peak_nbytes


def by_hand(plan: str, name: str, settings: dict[str, Any], rows: int) -> tuple[str, str, str, dict[str, Any]]:
    """What the engine says to `backward`, to `update` and to a batch of another shape; and the part of the batch."""
    engine, batch = engine_of(plan, name, settings), zoo.example_batch(name, rows, **settings)
    parts = {key: (part.of, part.shape, part.index) for key, part in engine.batch_part.items()}
    return _said(engine.backward, *batch), _said(engine.update), _said(engine.step, *(each[:2] for each in batch)), parts


def refused(plan: str, name: str, settings: dict[str, Any], **options: Any) -> str:
    return _said(engine_of, plan, name, settings, **options)


def _said(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        made = call(*args, **kwargs)
    except (RunError, FitError) as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(made, Engine):
        made.close()
    return ""
