"""What ranks do in the tests of a sparse exchange under a plan."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from scrimp import SGD, Dense, Engine, Memory, Plan, zoo
from scrimp.chunks import Slot
from scrimp.engine.gradients import sparse
from scrimp.exchange import Pace
from tests.rank_jobs import sparse as plainly
from tests.rank_jobs.sparse import LR, MOMENTUM, State
from tests.support import bounds
from tests.support.sparse_formulas import Oracle

ROWS = 8


def engine_of(plan: str, name: str, settings: dict[str, Any], **others: Any) -> Engine:
    return plainly.engine_of(name, settings, plan=Plan.from_json(plan), **others)


def batch_of(name: str, step: int) -> tuple[torch.Tensor, ...]:
    return zoo.example_batch(name, ROWS, step=step)


def train(plan: str, name: str, steps: int, settings: dict[str, Any], **others: Any) -> tuple[State, list[float], dict[str, Any]]:
    """Weights and losses; by parameter this rank's part and the bits of what it holds; device bytes by kind."""
    engine = engine_of(plan, name, settings, **others)
    losses = [float(engine.step(*batch_of(name, step))) for step in range(steps)]
    state = dict(engine.iter_state())
    tiling, rank = engine._run.store.tiling, dist.get_rank()
    assert tiling is not None
    held = {
        slot.name: (tiling.label(slot.name, rank), [*map(torch.clone, (piece.master, engine_residual(engine, slot)))])
        for slot, piece in _pieces(engine)
    }
    device = engine.ledger.device
    seen = {"held": held, "now": dict(device.now), "peak": device.live_peak.nbytes, "norm": engine.optimizer.norm}
    return state, losses, {**seen, "sending": engine._run.exchanging.sending_nbytes()}  # type: ignore[attr-defined]


def engine_residual(engine: Engine, slot: Slot) -> torch.Tensor:
    found = {share.slot.name: share for _, share in engine._run.exchanging.with_residual()}  # type: ignore[attr-defined]
    if slot.name not in found:
        return torch.zeros(0)
    share = found[slot.name]
    return engine._run.exchanging.residuals.of(share.name).read(slice(0, share.numel))  # type: ignore[attr-defined]


def _pieces(engine: Engine) -> Iterator[tuple[Slot, Any]]:
    engine._run.wait()
    store = engine._run.store
    for layer, space in enumerate(store.table.layers):
        for slot in space.slots:
            if slot.trainable:
                yield slot, store.direct(layer).piece(slot, 0)


def beside_no_plan(plan: str, name: str, steps: int, settings: dict[str, Any], **others: Any) -> list[str]:
    """What differs, in bits, from an engine without a plan on the same ranks: weights, residuals, or the mean of the losses."""
    engines = engine_of(plan, name, settings, **others), plainly.engine_of(name, settings, **others)
    losses: list[list[float]] = [[], []]
    for step in range(steps):
        for engine, into in zip(engines, losses, strict=True):
            into.append(float(engine.step(*plainly.batch_of(name, step, dist.get_world_size(), dist.get_rank()))))
    (mine, other), residuals = ([dict(engine.iter_state()) for engine in engines], [*map(plainly._residuals, engines)])
    found = [key for key in other if not torch.equal(mine[key], other[key])]
    found += [f"residual of {key}" for key in residuals[1] if not torch.equal(residuals[0][key], residuals[1][key])]
    mean = torch.tensor(losses[1], dtype=torch.float64)
    dist.all_reduce(mean)
    off = (torch.tensor(losses[0], dtype=torch.float64) - mean / dist.get_world_size()).abs().max()
    return [*found, *(["loss"] if float(off) > 1e-6 * float(mean.max()) else [])]


def beside_dense(plan: str, name: str, settings: dict[str, Any]) -> tuple[float, list[float], list[float]]:
    """With everything sent. After one step: the largest difference of a weight from a dense run, as a multiple of the bound that
    counts roundings. After more steps the losses of both."""
    few, dense = engine_of(plan, name, settings), _dense(plan, name)
    before = {slot.name: piece.master.clone().double() for slot, piece in _pieces(few)}
    with recording(few) as gradients:
        losses = [[float(engine.step(*batch_of(name, 0)))] for engine in (few, dense)]
    group, world = _group(few)
    worst = 0.0
    for (slot, mine), (_, theirs) in zip(_pieces(few), _pieces(dense), strict=True):
        size = gradients[slot.name].abs()  # of the summands
        dist.all_reduce(size, group=group)
        size = LR * size / world
        # Each sums `world` numbers, multiplies by the rate, and subtracts.
        bound = 2 * bounds.gamma(world + bounds.UPDATE) * (before[slot.name].abs() + size)
        worst = max(worst, bounds.excess(mine.master, theirs.master, bound))
    for step in range(1, 6):
        for engine, into in zip((few, dense), losses, strict=True):
            into.append(float(engine.step(*batch_of(name, step))))
    return worst, *losses


def _dense(plan: str, name: str) -> Engine:
    torch.manual_seed(0)
    optimizer = SGD(lr=LR, momentum=MOMENTUM)
    return Engine(
        zoo.build(name), plan=Plan.from_json(plan), optimizer=optimizer, precision="fp32", device="cpu", exchange=Dense()
    )


@contextmanager
def recording(engine: Engine) -> Iterator[dict[str, torch.Tensor]]:
    """The gradients that the exchange is given, in fp64."""
    exchange, found = engine._run.exchanging, dict[str, torch.Tensor]()
    receive = exchange.receive

    def recorded(training: Any, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
        found[slot.name] = gradient.reshape(-1).double()
        receive(training, layer, slot, gradient, first=first)

    exchange.receive = recorded  # type: ignore[method-assign]
    try:
        yield found
    finally:
        exchange.receive = receive  # type: ignore[method-assign]


def _group(engine: Engine) -> tuple[Any, int]:
    """Another group of the ranks that this rank exchanges with."""
    mine = engine._run.exchanging._partners  # type: ignore[attr-defined]
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, tuple(mine))
    groups = {ranks: dist.new_group([*ranks]) for ranks in sorted({*rows})}
    return groups[tuple(mine)], len(mine)


def follow(
    plan: str, name: str, steps: int, density: float, small: int, share: float | None = None, **others: Any
) -> tuple[list[str], float, set[str]]:
    """What was wrong on the way by the formulas; the largest error of a gradient, the mean of the ranks' summands, relative to
    its norm or to a floor, a tenth of the largest norm; tiers of the layers. `share`: of the plan's peak, the budget."""
    if share is not None:
        others["memory"] = Memory(device=int(share * Plan.from_json(plan).memory.peak_nbytes))
    how = {key: others.pop(key) for key in ("adam", "raw", "clip")}
    settings = {"density": density, "small": small, "of": "gradient" if how["raw"] else "update"}
    engine = engine_of(plan, name, settings, clip_norm=how["clip"], **others)
    tiling, (group, _) = engine._run.store.tiling, _group(engine)
    assert tiling is not None
    oracle = Oracle(name, density, small, group=group, counted=tiling.counts, **how)
    whole, wrong, worst = zoo.build(name), list[str](), 0.0
    for step in range(steps):
        before, state = _copied(engine), dict(engine.iter_state())
        with recording(engine) as gradients:
            engine.step(*batch_of(name, step))
        after = _copied(engine)
        wrong += [f"step {step}, {said}" for said in oracle.judge(step, gradients, before, after, engine.optimizer.norm)]
        whole.load_state_dict(state)
        whole.zero_grad()
        whole(*batch_of(name, step)).backward()
        floor = 0.1 * max(float(each.grad.norm()) for each in whole.parameters())  # type: ignore[union-attr]
        for slot, piece in _pieces(engine):
            gradient = whole.get_parameter(slot.name).grad
            assert gradient is not None
            mine = tiling.cut(slot.name, gradient)[piece.inside]
            error = float((oracle._mean(gradients[slot.name]) - mine).norm())
            worst = max(worst, error / max(float(gradient.norm()), floor))
    return wrong, worst, {str(placement.tier) for placement in engine._run.store.placements}


def _copied(engine: Engine) -> tuple[State, State]:
    pieces = [*_pieces(engine)]
    return (
        {slot.name: piece.master.clone() for slot, piece in pieces},
        {slot.name: engine_residual(engine, slot).clone() for slot, _ in pieces},
    )


def poisoned(plan: str, name: str, settings: dict[str, Any], **others: Any) -> tuple[list[str], bool, bool, int]:
    """One gradient of rank 1 has a NaN in step 2: what is said, whether weights stayed, whether it goes on, skipped steps."""
    engine = engine_of(plan, name, settings, **others)
    for step in range(2):
        engine.step(*batch_of(name, step))
    before, exchange = dict(engine.iter_state()), engine._run.exchanging
    receive = exchange.receive

    def spoiled(training: Any, layer: int, slot: Slot, gradient: torch.Tensor, *, first: bool) -> None:
        if dist.get_rank() == 1 and slot.name == "blocks.1.mlp.up.weight":
            gradient.view(-1)[0] = float("nan")
        receive(training, layer, slot, gradient, first=first)

    exchange.receive = spoiled  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.step(*batch_of(name, 2))
    exchange.receive = receive  # type: ignore[method-assign]
    kept = all(torch.equal(value, before[key]) for key, value in engine.iter_state())
    on = all(float(engine.step(*batch_of(name, step))) < 10 for step in range(3, 5))
    return [str(each.message) for each in caught], kept, on, engine.optimizer.skipped


def differs(plan: str, name: str, settings: dict[str, Any]) -> str:
    """One rank's weight changes by itself: what the comparison of replicas says."""
    engine = engine_of(plan, name, {**settings, "check_every": 1})
    engine.step(*batch_of(name, 0))
    engine._run.wait()
    if dist.get_rank() == 1:
        engine._run.store.placements[2].weights[3] += 1
    try:
        engine.step(*batch_of(name, 1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def resumed(
    plan: str, name: str, steps: int, stop: int, settings: dict[str, Any], folder: str, **others: Any
) -> tuple[State, list[float]]:
    """Saved at `stop`, and on in a new engine."""
    engine = engine_of(plan, name, settings, **others)
    losses = [float(engine.step(*batch_of(name, step))) for step in range(stop)]
    engine.save(folder)
    again = engine_of(plan, name, settings, seed=5, **others)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load(folder)
    losses += [float(again.step(*batch_of(name, step))) for step in range(stop, steps)]
    return dict(again.iter_state()), losses


def loads(plan: str | None, name: str, settings: dict[str, Any], folder: str, **others: Any) -> tuple[list[str], dict[str, bool]]:
    """What is said on loading a checkpoint, and whether the residual of each part is there."""
    engine = plainly.engine_of(name, settings, **others) if plan is None else engine_of(plan, name, settings, **others)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.load(folder)
    return [str(each.message) for each in caught], {key: bool(value.any()) for key, value in plainly._residuals(engine).items()}


def chooses(plan: str, name: str, settings: dict[str, Any]) -> tuple[list[bool], State]:
    """As if ranks had measured different networks: which layers travel whole, and the weights after some steps."""
    pace = Pace(network=1e12 if dist.get_rank() % 2 else 1e6, selecting=1e8)
    with patch.object(sparse, "measure_pace", lambda *_: pace):
        engine = engine_of(plan, name, {**settings, "choose": True})
    for step in range(3):
        engine.step(*batch_of(name, step))
    return engine._run.exchanging._summed, dict(engine.iter_state())  # type: ignore[attr-defined]
