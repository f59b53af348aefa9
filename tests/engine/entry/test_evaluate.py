"""`engine.evaluate(fn, ...)`: any function of the model, within the budget."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn

from scrimp.chunks.tables.optimizers import SGD, AdamW
from scrimp.engine import Engine, Memory
from scrimp.errors import FitError, RunError
from tests.rank_jobs import hf as jobs

NEW = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}


@cache
def model_of(name: str) -> nn.Module:
    pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")
    torch.manual_seed(0)
    return jobs.build(name, n_layer=4) if name == "gpt2" else jobs.build(name, num_hidden_layers=4)


def engine_for(name: str, device: int | str) -> Engine:
    model = copy.deepcopy(model_of(name))
    return Engine(model, optimizer=AdamW(), memory=Memory(device=device), device="cpu", precision="fp32", chunk_numel=1000)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generate_makes_the_tokens_of_plain_pytorch(name: str) -> None:
    """With its cache of keys and values, where all fits and at the least budget, which a first call showed."""
    ids = jobs.batches(1, batch=2)[0][0][:, :6]
    want = copy.deepcopy(model_of(name)).eval().generate(ids, **NEW)
    assert want.shape == (2, 16)
    loose = engine_for(name, "1GiB")
    calls: list[int] = []
    loose._run.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert torch.equal(loose.evaluate(loose._run.model.generate, ids, **NEW), want)
    assert calls == [6, *[1] * 9]  # one token at a time: the others are in the cache
    least = loose.ledger.peak_nbytes
    weights = sum(weight.nbytes for weight in model_of(name).parameters())
    assert least < weights
    tight = engine_for(name, least)
    assert torch.equal(tight.evaluate(tight._run.model.generate, ids, **NEW), want)
    assert tight.ledger.peak_nbytes == least
    short = engine_for(name, least - 4096)
    with pytest.raises(FitError):
        short.evaluate(short._run.model.generate, ids, **NEW)


def test_generate_between_steps_leaves_the_steps_alone() -> None:
    ids = jobs.batches(1, batch=2)[0][0][:, :6]
    states = []
    for generating in (False, True):
        engine = engine_for("gpt2", "1GiB")
        for tokens, labels in jobs.batches(6):
            engine.step(input_ids=tokens, labels=labels)
            if generating:
                engine.evaluate(engine._run.model.generate, ids, **NEW)
                assert engine._run.model.training
        states.append(engine.state_dict())
    plain = copy.deepcopy(model_of("gpt2")).eval()
    plain.load_state_dict(states[0])
    assert torch.equal(engine.evaluate(engine._run.model.generate, ids, **NEW), plain.generate(ids, **NEW))
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.first(x))))

    def score(self, x: torch.Tensor, *, power: int) -> torch.Tensor:
        return nn.functional.linear(self(x), self.first.weight.T[:, :8]).pow(power).sum()


def small(device: int | str = "1GiB") -> tuple[Engine, Net]:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model).eval()
    settings = {"memory": Memory(device=device), "device": "cpu", "precision": "fp32"}
    return Engine(model, optimizer=SGD(lr=0.1), loss=torch.mean, **settings), plain


def test_methods_functions_and_submodules() -> None:
    """Called with the arguments that follow; in eval mode, without gradients; weights that are returned are copies."""
    engine, plain = small()
    x = torch.randn(4, 8)
    got = engine.evaluate(engine._run.model.score, x, power=2)
    assert torch.equal(got, plain.score(x, power=2).detach())
    assert not got.requires_grad
    assert torch.equal(engine.evaluate(lambda rows: engine._run.model(rows).argmax(1), x), plain(x).argmax(1))
    assert torch.equal(engine.evaluate(engine._run.model.first, x), plain.first(x))
    assert torch.equal(engine.evaluate(engine._run.model, x), engine.evaluate(x))
    weights = engine.evaluate(lambda: dict(engine._run.model.named_parameters()))
    engine.step(x)
    assert all(torch.equal(weights[name], weight) for name, weight in plain.named_parameters())
    with pytest.raises(RunError, match=r"outside of the engine.*engine\.evaluate\(function"):
        engine._run.model(x)


def test_a_function_that_did_not_fit_draws_the_same_numbers_when_it_runs_again() -> None:
    x, runs = torch.randn(4, 8), []

    def sample(engine: Engine) -> torch.Tensor:
        runs.append(torch.rand(3).tolist())
        return engine._run.model(torch.rand(300, 8)).sum()

    probe, _ = small()
    probe.evaluate(sample, probe)  # with no home on the device
    engine, _ = small(probe.ledger.peak_nbytes)
    for _ in range(5):
        engine.step(x)
    assert any(placement.tier == "device" for placement in engine._run.store.placements)
    torch.manual_seed(1)
    runs.clear()
    engine.evaluate(sample, engine)
    assert len(runs) == 2
    assert runs[0] == runs[1]
    assert not any(placement.tier == "device" for placement in engine._run.store.placements)
