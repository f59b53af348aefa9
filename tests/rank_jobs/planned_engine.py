"""Training under a plan on real ranks."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import scrimp.planner
from scrimp import SGD, AdamW, Engine, Memory, Plan, RunError, zoo
from scrimp.errors import FitError
from tests.support.lowering import staged

OPTIMIZERS = {"adamw": lambda: AdamW(lr=1e-3), "sgd": lambda: SGD(lr=1e-2, momentum=0.9)}


def model_of(name: str, settings: dict[str, Any]) -> nn.Module:
    """A model of the zoo, or a T5."""
    torch.manual_seed(0)
    return staged.build(name, **settings) if name == "t5" else zoo.build(name, **settings)


def stepped(engine: Engine, name: str, settings: dict[str, Any], rows: int, step: int) -> float:
    if name == "t5":
        return float(engine.step(**staged.batch_for(name, rows, step=step)))  # type: ignore[arg-type]
    return float(engine.step(*zoo.example_batch(name, rows, step=step, **settings)))


def engine_of(plan: str, name: str, settings: dict[str, Any], **options: Any) -> Engine:
    found = Plan.from_json(plan)
    given = {"optimizer": OPTIMIZERS[found.optimizer](), "precision": found.precision, "device": "cpu", **options}
    return Engine(model_of(name, settings), plan=found, **given)


def train(
    plan: str, name: str, settings: dict[str, Any], rows: int, steps: int, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """The losses, the parameters after the steps (rank 0), and what the ledger says."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = engine_of(plan, name, settings, **options)
        losses = [stepped(engine, name, settings, rows, step) for step in range(steps)]
    device = engine.ledger.device
    ledger = {
        "peak": device.live_peak.nbytes,
        "all": device.peak_nbytes,
        "kinds": device.live_peak,
        "norm": engine.optimizer.norm,
    }
    ledger["host"] = engine.ledger.host.peak_nbytes
    state = engine.state_dict()
    engine.close()
    dist.barrier()
    return losses, state, ledger


def by_parts(plan: str, name: str, rows: int) -> tuple[float, float, float]:
    """The loss of a step with the global batch, of the same step with this rank's part, and of micro-batches by hand."""
    batch = zoo.example_batch(name, rows)
    whole, part = engine_of(plan, name, {}), engine_of(plan, name, {})
    names = [*part.batch_part]
    parts = [tensor[part.batch_part[each].index] for each, tensor in zip(names, batch, strict=True)]  # type: ignore[index]
    losses = float(whole.step(*batch)), float(part.step(*parts))
    return *losses, float(part.step(*batch))


Options = dict[str, Any] | None


def saves(plan: str, name: str, rows: int, folder: str, options: Options = None, **settings: Any) -> list[float]:
    """Two steps, a checkpoint, two more steps. `options`: of the engine."""
    engine = engine_of(plan, name, settings, **(options or {}))
    for step in range(2):
        stepped(engine, name, settings, rows, step)
    engine.save(folder)
    return [stepped(engine, name, settings, rows, step) for step in (2, 3)]


def loads(plan: str, name: str, rows: int, folder: str, options: Options = None, **settings: Any) -> tuple[list[float], float]:
    """The next steps after a checkpoint, and the loss of an evaluation before them."""
    engine = engine_of(plan, name, settings, **(options or {}))
    engine.load(folder)
    evaluated = engine.evaluate(*zoo.example_batch(name, rows, step=2, **settings))
    return [stepped(engine, name, settings, rows, step) for step in (2, 3)], float(evaluated)


def accumulates(plan: str, name: str, rows: int, calls: int) -> list[float]:
    """The losses of several calls of backward, and of one more after an update."""
    engine = engine_of(plan, name, {})
    losses = [float(engine.backward(*zoo.example_batch(name, rows // calls, step=step))) for step in range(calls)]
    engine.update()
    return [*losses, float(engine.backward(*zoo.example_batch(name, rows // calls, step=0)))]


def evaluates(plan: str, name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor, list[dict[str, int]]]:
    """Outputs of the model at another batch size, before and after a step, and what is on the device before and after."""
    engine = engine_of(plan, name, {})
    tokens = zoo.example_batch(name, 3)[0]
    now = [dict(engine.ledger.now)]
    before = engine.evaluate(tokens).clone()
    engine.step(*zoo.example_batch(name, rows))
    after = engine.evaluate(tokens).clone()
    return before, after, [*now, dict(engine.ledger.now)]


def edits(plan: str, name: str, parameter: str) -> torch.Tensor:
    """A parameter after it was doubled in place."""
    engine = engine_of(plan, name, {})
    with engine.full_parameters(parameter) as model:
        model.get_parameter(parameter).data.mul_(2)
    return dict(engine.iter_state())[parameter]


def poisoned(plan: str, name: str, rows: int, rank: int) -> tuple[int, str, list[float]]:
    """Steps where one rank's share of a weight is not a number: skipped steps, the warning, and losses after it is mended."""
    engine = engine_of(plan, name, {})
    store, losses = engine._run.store, []
    slot = next(slot for slot in store.table.layers[1].slots if slot.trainable)
    good = store.placements[1].weights[slot.start].clone()
    if dist.get_rank() == rank:
        store.placements[1].weights[slot.start] = float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.step(*zoo.example_batch(name, rows))
    if dist.get_rank() == rank:
        store.placements[1].weights[slot.start] = good
    losses = [float(engine.step(*zoo.example_batch(name, rows)))]
    return engine.optimizer.skipped, str(caught[0].message) if caught else "", losses


def refused(plan: str, name: str, rows: int, settings: dict[str, Any] | None = None, **options: Any) -> str:
    """What the engine says to a batch or to settings that the plan is not for."""
    try:
        engine = engine_of(plan, name, settings or {}, **options)
        engine.step(*zoo.example_batch(name, rows, **(settings or {})))
    except (RunError, FitError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def tiered(plan: str, name: str, rows: int, steps: int, share: float, host: str | None) -> tuple[list[float], int, list[str]]:
    """Steps with a budget of a share of the plan's peak, the peak, and the layers' tiers at the end."""
    nbytes = int(share * Plan.from_json(plan).memory.peak_nbytes)
    engine = engine_of(plan, name, {}, memory=Memory(device=nbytes, **({} if host is None else {"host": host})))
    losses = [float(engine.step(*zoo.example_batch(name, rows, step=step))) for step in range(steps)]
    return losses, engine.ledger.peak_nbytes, [str(placement.tier) for placement in engine._run.store.placements]


KEPT = ("XDG_CACHE_HOME", "SCRIMP_GRAPHS")


def start(plan: str, name: str, rows: int, folder: str, *, switch: str = "1", stranger: int = -1, hooked: bool = False) -> Any:
    """How often this rank captured, and the loss of the first step. `stranger`: a rank whose model has one attribute more;
    `hooked`: models have a hook, and so no key."""
    before = {name: os.environ.get(name) for name in KEPT}
    os.environ.update(XDG_CACHE_HOME=folder, SCRIMP_GRAPHS=switch)
    try:
        found = Plan.from_json(plan)
        torch.manual_seed(0)
        model = zoo.build(name)
        if dist.get_rank() == stranger:
            model.more = True  # type: ignore[assignment]
        if hooked:
            model.register_forward_pre_hook(lambda *_: None)
        with mock.patch.object(scrimp.planner, "captured_for", wraps=scrimp.planner.captured_for) as captured:
            optimizer = OPTIMIZERS[found.optimizer]()
            engine = Engine(model, plan=found, optimizer=optimizer, precision=found.precision, device="cpu")
        loss = float(engine.step(*zoo.example_batch(name, rows)))
        engine.close()
        return captured.call_count, loss
    finally:
        for each, value in before.items():
            os.environ.pop(each, None)
            if value is not None:
                os.environ[each] = value


def as_dtensors(plan: str, name: str, rows: int) -> dict[str, tuple[bool, bool, tuple[str, ...], bool]]:
    """After a step, of each parameter by each name: whether `full_tensor` has the bits of the engine's state; whether a second
    call gave an equal local tensor; its placements; whether it is on the engine's mesh."""
    engine = engine_of(plan, name, {})
    engine.step(*zoo.example_batch(name, rows))
    found, again, mesh = engine.dtensors(), engine.dtensors(), Plan.from_json(plan).mesh
    state = {key: value for key, value in engine.iter_state() if key in found}
    assert found.keys() == state.keys()
    assert all(each.device_mesh is again[key].device_mesh for key, each in found.items())
    return {
        key: (
            torch.equal(each.full_tensor(), state[key]),
            torch.equal(each.to_local(), again[key].to_local()),
            tuple(map(str, each.placements)),
            each.device_mesh.mesh_dim_names == mesh.names and each.dtype == torch.float32,
        )
        for key, each in found.items()
    }
