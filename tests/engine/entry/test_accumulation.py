"""`engine.backward(...)` several times, then `engine.update()`: the numbers of one step, and of plain PyTorch."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import zoo
from scrimp.chunks.store.placement import DEVICE, DISK, HOST
from scrimp.chunks.tables.optimizers import SGD, AdamW
from scrimp.engine import Engine, Memory
from scrimp.errors import FitError, RunError
from scrimp.exchange import Sparse
from scrimp.ext.ranks import pool
from tests.engine.test_engine import LR, adamw, assert_same, traced_peak
from tests.rank_jobs import accumulation as jobs
from tests.support.reference import train_bf16, train_fp32

STEPS = 4


@cache
def model_of() -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("gpt-tiny", layers=2)


@cache
def batches() -> list[Any]:
    return [zoo.example_batch("gpt-tiny", batch=4, step=step) for step in range(STEPS)]


def engine_for(device: int | str = "1GiB", *, memory: Memory | None = None, **settings: Any) -> Engine:
    memory = memory or Memory(device=device)
    return Engine(copy.deepcopy(model_of()), optimizer=AdamW(lr=LR), memory=memory, device="cpu", **settings)


def by_calls(engine: Engine, accumulate: int) -> list[float]:
    losses = []
    for batch in batches():
        parts = [engine.backward(*(tensor.chunk(accumulate)[k] for tensor in batch)) for k in range(accumulate)]
        engine.update()
        losses.append(float(torch.stack(parts).float().mean()))
    return losses


@pytest.mark.parametrize("accumulate", [1, 2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(("precision", "clip"), [("fp32", None), ("bf16", 0.5)])
def test_the_numbers_of_plain_pytorch(precision: str, clip: float | None, accumulate: int) -> None:
    """Where all fits, and at the least budget."""
    loop = train_fp32 if precision == "fp32" else train_bf16
    want, losses = loop(model_of(), batches(), adamw, clip=clip, micro_batches=accumulate)
    settings = {"precision": precision, "clip_norm": clip, "micro_batches": accumulate}
    loose = engine_for(**settings)
    assert by_calls(loose, accumulate) == losses
    assert_same(loose.state_dict(), want)
    assert DEVICE in {placement.tier for placement in loose._run.store.placements}
    probe = engine_for(**settings, activations="recompute,offload")
    probe.backward(*(tensor.chunk(accumulate)[0] for tensor in batches()[0]))
    probe.update()
    tight = engine_for(traced_peak(probe), **settings, activations="recompute,offload")
    by_calls(tight, accumulate)
    assert HOST in {placement.tier for placement in tight._run.store.placements}
    assert_same(tight.state_dict(), want)


@pytest.mark.parametrize("settings", [{"skip_nonfinite": False}, {"precision": "fp16"}, {"disk": True}])
def test_the_numbers_of_one_step(settings: dict[str, Any], tmp_path: Path) -> None:
    """Where updates begin in backward, with a loss scale, and with states on disk."""
    engines = []
    for k in range(2):
        memory = Memory(device="1GiB", host="440KiB", disk=tmp_path / str(k)) if "disk" in settings else None
        (tmp_path / str(k)).mkdir()
        more = {key: value for key, value in settings.items() if key != "disk"}
        engines.append(engine_for(memory=memory, micro_batches=2, **more))
    if "disk" in settings:
        assert DISK in {placement.tier for placement in engines[0]._run.store.placements}
    assert by_calls(engines[0], 2) == [float(engines[1].step(*batch)) for batch in batches()]
    assert_same(engines[0].state_dict(), engines[1].state_dict())
    assert engines[0].optimizer.steps == engines[1].optimizer.steps == STEPS


@pytest.mark.parametrize("settings", [{"precision": "fp32"}, {"precision": "bf16", "clip_norm": 0.5, "chunk_numel": 3000}])
def test_two_ranks(settings: dict[str, Any]) -> None:
    """The sums are taken in the same order as in one step: the same bits."""
    calls, whole = (pool(2).run(jobs.train, flag, 4, settings, timeout_seconds=240) for flag in (True, False))
    for (state, losses), (want, other) in zip(calls, whole, strict=True):
        assert losses == other
        assert_same(state, want)


def test_steps_calls_and_shapes_may_alternate() -> None:
    """A plan for one is not taken for the other, and micro-batches need not have one shape."""
    tokens, targets = batches()[0]
    engine = engine_for(micro_batches=2, precision="fp32")
    plain = copy.deepcopy(model_of())
    optimizer = adamw(list(plain.parameters()))
    for turn in range(6):
        for rows in (slice(0, 1), slice(1, 4)):
            (plain(tokens[rows], targets[rows]) / 2).backward()
            engine.backward(tokens[rows], targets[rows])
        optimizer.step()
        optimizer.zero_grad()
        engine.update()
        if turn % 2:
            for k in range(2):
                (plain(tokens.chunk(2)[k], targets.chunk(2)[k]) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.step(tokens, targets)
    assert_same(engine.state_dict(), plain.state_dict())


class Fragile(nn.Module):
    """Fails in forward, or in the middle of backward, when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.bad = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bad == "forward":
            raise ValueError("in forward")
        middle = self.second(self.first(x))
        if self.bad in ("backward", "fit"):
            middle.register_hook(self.fail)
        return self.third(middle).mean()

    def fail(self, gradient: torch.Tensor) -> None:
        raise (FitError if self.bad == "fit" else ValueError)("in backward")


def fragile(accumulate: int = 2, **settings: Any) -> Engine:
    torch.manual_seed(0)
    chosen = {"memory": Memory(device="1GiB"), "device": "cpu", "precision": "fp32", **settings}
    return Engine(Fragile(), optimizer=SGD(lr=0.1), micro_batches=accumulate, **chosen)


@pytest.mark.parametrize(("precision", "bad"), [("fp32", "backward"), ("bf16", "fit")])
def test_a_second_backward_that_fails(precision: str, bad: str) -> None:
    """Before its first gradient it is as if it had not been; later it loses what was pending, and says so."""
    x = [torch.randn(3, 4) for _ in range(3)]
    engine, want = fragile(precision=precision), fragile(precision=precision)
    for _ in range(4):  # until the schedule holds
        for one in (engine, want):
            one.backward(x[0])
            one.backward(x[1])
            one.update()
    for one in (engine, want):
        one.backward(x[0])
    engine._run.model.bad = "forward"
    with pytest.raises(ValueError, match="in forward") as raised:
        engine.backward(x[1])
    assert not getattr(raised.value, "__notes__", [])
    engine._run.model.bad = ""
    for one in (engine, want):
        one.backward(x[1])
        one.update()
    assert_same(engine.state_dict(), want.state_dict())
    before = engine.state_dict()
    engine.backward(x[0])
    engine._run.model.bad = bad
    with pytest.raises(FitError if bad == "fit" else ValueError, match="in backward") as raised:
        engine.backward(x[1])
    assert "gradients of 1 earlier engine.backward calls went with it; no weight changed" in raised.value.__notes__[0]
    with pytest.raises(RunError, match=r"has no gradients: engine\.backward call 2 failed when it had gradients"):
        engine.update()
    assert_same(engine.state_dict(), before)
    engine._run.model.bad = ""
    for one in (engine, want):
        one.backward(x[2])
        one.backward(x[1])
        one.update()
    assert_same(engine.state_dict(), want.state_dict())


def test_a_larger_micro_batch_that_does_not_fit_beside_homes() -> None:
    """Homes go back to the host with the gradients that wait in them."""
    small, large = (tensor[:1, :8] for tensor in batches()[0]), batches()[1]
    small = tuple(small)
    probe = engine_for(micro_batches=2, precision="fp32", activations="recompute,offload")
    probe.backward(*large)
    probe.update()
    budget = traced_peak(probe)
    engine, want = engine_for(budget, micro_batches=2, precision="fp32"), engine_for(micro_batches=2, precision="fp32")
    for _ in range(4):
        for one in (engine, want):
            one.backward(*small)
            one.update()
    assert DEVICE in {placement.tier for placement in engine._run.store.placements}
    for one in (engine, want):
        one.backward(*small)
        one.backward(*large)
        one.update()
    assert_same(engine.state_dict(), want.state_dict())
    with pytest.raises(FitError):
        engine.backward(*(tensor.repeat(16, 1) for tensor in large))


def test_a_gradient_that_is_not_finite_skips_the_update() -> None:
    engine = fragile()
    before = engine.state_dict()
    engine.backward(torch.ones(3, 4))
    engine.backward(torch.full((3, 4), float("inf")))
    with pytest.warns(UserWarning, match="is not finite; the update is skipped"):
        engine.update()
    assert (engine.optimizer.skipped, engine.optimizer.steps) == (1, 1)
    assert_same(engine.state_dict(), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_calls_in_a_wrong_order(precision: str, tmp_path: Path) -> None:
    x = torch.ones(3, 4)
    engine = fragile(precision=precision)
    with pytest.raises(RunError, match=r"has no gradients; call engine\.backward"):
        engine.update()
    engine.save(tmp_path / "checkpoint")
    engine.backward(x)
    calls = {
        "step": lambda: engine.step(x), "evaluate": lambda: engine.evaluate(x), "state_dict": engine.state_dict,
        "iter_state": lambda: dict(engine.iter_state()), "save": lambda: engine.save(tmp_path / "other"),
    }  # fmt: skip
    for name, call in calls.items():
        with pytest.raises(RunError, match=rf"engine\.{name} with the gradients of 1 engine\.backward calls pending"):
            call()
    engine.backward(x)
    words = (
        r"called 2 times.*micro_batches=2\) divides each loss by 2: call engine\.update\(\), or build Engine\(micro_batches=3\)"
    )
    with pytest.raises(RunError, match=words):
        engine.backward(x)
    engine.update()
    engine.backward(x)
    engine.load(tmp_path / "checkpoint")  # which leaves nothing of it
    with pytest.raises(RunError, match=r"those of 1 engine\.backward calls were discarded"):
        engine.update()
    assert engine.optimizer.steps == 0
    other = fragile(precision=precision)
    for one in (engine, other):
        one.backward(x)
        one.update()
    assert_same(engine.state_dict(), other.state_dict())
    single = fragile(1, precision=precision)
    single.backward(x)
    with pytest.raises(
        RunError, match=r"micro_batches=1\) has no buffer to accumulate gradients in.*Engine\(micro_batches=2\) or more"
    ):
        single.backward(x)
    single.update()
    sparse = fragile(exchange=Sparse(density=0.5))
    with pytest.raises(RunError, match=r"engine\.backward with Sparse is not possible.*engine\.step"):
        sparse.backward(x)


def test_the_rate_is_that_of_the_update() -> None:
    engine, want = fragile(), fragile()
    want.lr = 0.3
    for one in (engine, want):
        one.backward(torch.ones(3, 4))
        one.lr = 0.3
        one.update()
        one.lr = 100.0
    assert_same(engine.state_dict(), want.state_dict())
