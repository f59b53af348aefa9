"""Edges that a review of the engine found: each once went wrong."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import SGD, AdamW, CheckpointError, Engine, Memory, RunError
from scrimp.ext.ranks import pool
from tests.rank_jobs import engine as jobs


class Net(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def engine_of(model: nn.Module | None = None, **settings: Any) -> Engine:
    settings = {"memory": Memory(device="1MiB"), "precision": "fp32", "device": "cpu", **settings}
    return Engine(model or Net(), **settings)


def test_a_save_never_takes_the_place_of_anything_but_a_checkpoint(tmp_path: Path) -> None:
    engine = engine_of()
    engine.save(tmp_path / "run" / "step-1")
    engine.save(tmp_path / "run" / "step-1")  # a checkpoint may be replaced
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds \['notes.txt', 'step-1'\], which are no part of a checkpoint"):
        engine.save(tmp_path / "run")
    with pytest.raises(CheckpointError, match="is a file"):
        engine.save(tmp_path / "run" / "notes.txt")
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    engine.load(tmp_path / "run" / "step-1")


def test_an_interrupt_while_gradients_go_home_leaves_the_weights_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(precision="bf16")
    engine._run.planning._on_device = frozenset()
    engine.step(torch.ones(2, 16))
    before = engine.state_dict()
    down, count = engine._run.store.copy_streams.down, 0

    def interrupted(target: torch.Tensor, source: torch.Tensor) -> Any:
        nonlocal count
        count += 1
        event = down(target, source)
        if count == 3:
            raise KeyboardInterrupt
        return event

    monkeypatch.setattr(engine._run.store.copy_streams, "down", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step(torch.ones(2, 16))
    engine._run.residents.abandon()
    assert all(torch.equal(value, before[key]) for key, value in engine.state_dict().items())
    with engine._run.store.opened(0) as data:
        assert torch.equal(data.weights[: data.master.numel()], data.master.to(torch.bfloat16))


def test_an_engine_that_nobody_needs_is_freed_even_while_a_batch_of_it_lives() -> None:
    batch = torch.ones(2, 16)
    engine = engine_of()
    for _ in range(2):
        engine.step(batch)
    out = engine.evaluate(batch)
    gone = weakref.ref(engine._run.store)
    del engine
    gc.collect()
    assert gone() is None
    assert out.isfinite()


def test_a_batch_that_is_part_of_a_large_tensor_is_charged_for_itself() -> None:
    data = torch.randn(200_000, 16)  # 12 MiB
    engine = engine_of()
    for k in range(3):
        engine.step(data[4 * k : 4 * k + 4])
    assert engine.ledger.now["buffers"] == 0


class Careless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.layer(x).exp()
        b = a * a
        with torch.no_grad():
            a.zero_()
        return b.sum()


def test_what_backward_needs_and_was_changed_in_place_is_refused_as_in_plain_pytorch() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Careless()(torch.ones(2, 4)).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine_of(Careless(), activations="keep").step(torch.ones(2, 4))


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.weight.float() * x + target).sum()


def test_inputs_can_stay_in_their_own_precision() -> None:
    target = torch.tensor([1001.7])
    rounded = engine_of(Regression(), precision="bf16").step(torch.ones(1), target)
    exact = engine_of(Regression(), precision="bf16", cast_inputs=False).step(torch.ones(1), target)
    assert float(rounded) != float(exact) == pytest.approx(1001.7)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: engine_of(memory=1.5), "memory=1.5: give scrimp.Memory"),
        (lambda: engine_of(optimizer=torch.optim.SGD(Net().parameters())), "optimizer is a SGD; give scrimp.AdamW"),
        (lambda: engine_of(optimizer=AdamW(lr=-1)), r"AdamW\(lr=-1\) is not possible"),
        (lambda: engine_of(optimizer=AdamW(lr="3e-4")), r"AdamW\(lr='3e-4'\) is not possible: give a number"),
        (lambda: engine_of(optimizer=AdamW(betas=0.9)), r"AdamW\(betas=0.9\) is not possible: give two numbers"),
        (lambda: engine_of("gpt-tiny"), "the model is a str; give a torch.nn.Module"),
        (lambda: engine_of(optimizer=AdamW(betas=(2, 3))), r"AdamW\(betas=\(2, 3\)\) is not possible"),
        (lambda: engine_of(device="tpu"), "tpu"),
        (lambda: engine_of(engine_of()._run.model), "another engine has adopted this model"),
    ],
)
def test_refused_at_the_door(make: Any, words: str) -> None:
    with pytest.raises((RunError, RuntimeError), match=words):
        make()


def test_a_group_may_have_momentum_where_the_others_have_none() -> None:
    engine = engine_of(optimizer=SGD(lr=0.1, groups=[("blocks.0*", {"momentum": 0.9})]))
    for _ in range(3):
        engine.step(torch.ones(2, 16))
    assert engine._run.broken is None


def test_a_rate_that_cannot_be_told_harms_nothing() -> None:
    def lr(step: int) -> float:
        if step == 1:
            raise ValueError("no rate for that")
        return 0.1

    engine = engine_of(optimizer=SGD(lr=lr))
    engine.step(torch.ones(2, 16))
    before = engine.state_dict()
    with pytest.raises(ValueError, match="no rate for that"):
        engine.step(torch.ones(2, 16))
    assert all(torch.equal(value, before[key]) for key, value in engine.state_dict().items())


def test_stand_ins_that_were_changed_in_place_are_found() -> None:
    engine = engine_of()
    engine.step(torch.ones(2, 16))
    with torch.no_grad(), pytest.raises(RunError, match=r"blocks.0.0.weight: 'clamp_' has no values to work on between steps"):
        engine._run.model.blocks[0][0].weight.clamp_(-0.1, 0.1)
    engine.step(torch.ones(2, 16))


def test_a_parameter_without_elements() -> None:
    model = Net()
    model.blocks[0][0].register_parameter("nothing", nn.Parameter(torch.zeros(0)))
    engine = engine_of(model)
    for _ in range(3):
        engine.step(torch.ones(2, 16))


def test_ranks_of_different_budgets_and_shapes_do_the_same() -> None:
    for budgets, traced in pool(2).run(jobs.uneven, timeout_seconds=120):
        assert len({*budgets}) == 1
        assert traced <= 12  # of 30: then all shapes are covered by the largest
