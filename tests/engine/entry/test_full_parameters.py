"""Between steps: what is done to the model's parameters takes effect inside `engine.full_parameters()`, and raises outside."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import SGD, AdamW, Engine, FitError, Memory, RunError
from tests.engine.step.test_parameter_hooks import Net, batches


def engine_of(model: nn.Module | None = None, **settings: Any) -> Engine:
    torch.manual_seed(0)
    return Engine(model or Net(), **{"memory": Memory(device="1GiB"), "device": "cpu", "optimizer": SGD(lr=0.05)} | settings)


@pytest.mark.parametrize(
    "gesture",
    [
        lambda model: model.blocks[0][0].weight.data.clamp_(-0.1, 0.1),
        lambda model: model.blocks[0][0].weight.data.zero_(),
        lambda model: model.blocks[0][0].weight.data,
        lambda model: nn.init.zeros_(model.blocks[0][0].weight),
        lambda model: setattr(model.blocks[0][0].weight, "data", torch.zeros(32, 16)),
        lambda model: setattr(model.blocks[0][0].weight, "grad", torch.zeros(32, 16)),
        lambda model: model.blocks[0][0].weight.norm(),
        lambda model: torch.nn.utils.parameters_to_vector(model.parameters()),
        lambda model: model.to(torch.float64),
        lambda model: model.half(),
        lambda model: model.to("cuda"),
        lambda model: model.blocks[1].double(),
        lambda model: model.to_empty(device="cpu"),
    ],
)
def test_what_would_have_no_effect_raises_and_names_the_way(gesture: Any) -> None:
    engine = engine_of(precision="fp32")
    held = engine._run.model.blocks[0][0].weight
    for _ in range(2):
        with pytest.raises(RunError, match=r"with engine\.full_parameters\(\) as model"):
            gesture(engine._run.model)
        engine.step(batches()[0])
    assert engine._run.model.blocks[0][0].weight is held


def test_a_parameter_that_was_held_before_the_engine_is_the_one_between_steps() -> None:
    model = Net()
    held = model.blocks[0][0].weight
    held.tag = "mine"
    held.grad = torch.ones_like(held)
    engine = engine_of(model, precision="fp32")
    assert engine._run.model.blocks[0][0].weight is held
    assert (held.is_meta, held.tag, held.shape, held.numel(), held.dtype) == (True, "mine", (32, 16), 512, torch.float32)
    with pytest.raises(RunError, match="full_parameters"):
        held.data.zero_()
    assert "held by the engine" in repr(held)


def test_conversions_to_what_the_weights_are_do_nothing() -> None:
    engine = engine_of(precision="bf16")
    engine._run.model.bfloat16().to("cpu").to(torch.bfloat16)
    engine._run.model.zero_grad()
    engine.step(batches()[0])
    with pytest.raises(RunError, match=r"weights are torch\.bfloat16 on cpu.*converted to torch\.float32"):
        engine._run.model.float()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("memory", [{"device": "1GiB"}, {"device": "30KiB"}, {"device": "48KiB", "host": "48KiB", "disk": "."}])
def test_edits_take_effect_as_in_plain_pytorch(precision: str, memory: dict[str, str], tmp_path: Path) -> None:
    if "disk" in memory:
        memory = {**memory, "disk": str(tmp_path)}
    engine = engine_of(precision=precision, memory=Memory(**memory), optimizer=AdamW(lr=1e-2))
    for batch in batches()[:3]:
        engine.step(batch)
    before = engine.state_dict()
    with engine.full_parameters() as model:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(parameter.dtype == torch.float32 and parameter.is_cpu for parameter in model.parameters())
        model.blocks[1][0].weight.data.clamp_(-0.01, 0.01)
        with torch.no_grad():
            model.blocks[2][2].bias.fill_(0.123456789)
    want = {**before, "blocks.1.0.weight": before["blocks.1.0.weight"].clamp(-0.01, 0.01)}
    want["blocks.2.2.bias"] = torch.full((16,), 0.123456789)
    assert all(torch.equal(value, want[name]) for name, value in engine.state_dict().items())
    reference = engine_of(precision=precision, optimizer=AdamW(lr=1e-2))
    engine.save(tmp_path / "ckpt")
    reference.load(tmp_path / "ckpt")
    for batch in batches()[3:]:
        assert torch.equal(engine.step(batch), reference.step(batch))
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in engine.state_dict().items())


def test_only_what_changed_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    written: list[str] = []
    adopt = engine._run.store.adopt

    def noted(layer: int, slot: Any, values: torch.Tensor) -> None:
        written.append(slot.name)
        adopt(layer, slot, values)

    monkeypatch.setattr(engine._run.store, "adopt", noted)
    with engine.full_parameters() as model:
        model.blocks[1][0].bias.data += 1
    assert written == ["blocks.1.0.bias"]
    with engine.full_parameters("blocks.2.*") as model:
        assert model.blocks[0][0].bias.is_meta
        model.blocks[2][0].bias.data.zero_()
    assert written == ["blocks.1.0.bias", "blocks.2.0.bias"]
    with pytest.raises(RunError, match=r"'heads\.\*'.*no parameter"), engine.full_parameters("heads.*"):
        pass


def test_load_state_dict_inside() -> None:
    engine = engine_of(precision="fp32")
    other = Net()
    with engine.full_parameters() as model:
        model.load_state_dict(other.state_dict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in engine.state_dict().items())


def test_an_exception_inside_writes_nothing() -> None:
    engine = engine_of()
    before = engine.state_dict()
    with pytest.raises(ZeroDivisionError), engine.full_parameters() as model:
        _zero_and_fail(model)
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.step(batches()[0])
    assert engine.ledger.host.now["temporaries"] == 0


@pytest.mark.parametrize(
    ("gesture", "words"),
    [
        (lambda model, engine: setattr(model.blocks[0][0], "weight", nn.Parameter(torch.zeros(32, 16))), "was replaced inside"),
        (lambda model, engine: model.blocks[0][0].weight.requires_grad_(False), "requires_grad=False at the end"),
        (lambda model, engine: model.half(), r"torch\.float16 of shape \(32, 16\)"),
        (lambda model, engine: engine.step(batches()[0]), "end the `with engine.full_parameters"),
        (lambda model, engine: engine.state_dict(), "end the `with engine.full_parameters"),
        (lambda model, engine: model(batches()[0]), "was called outside of the engine"),
    ],
)
def test_what_is_refused_inside(gesture: Any, words: str) -> None:
    engine = engine_of()
    before = engine.state_dict()
    with pytest.raises(RunError, match=words), engine.full_parameters() as model:
        gesture(model, engine)
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.step(batches()[0])


def test_parameters_that_the_host_has_no_room_for() -> None:
    engine = engine_of(memory=Memory(device="1GiB", host="24KiB"))
    with pytest.raises(FitError, match=r"engine\.full_parameters\('head\.\*'\)"), engine.full_parameters():
        pass
    with engine.full_parameters("blocks.0.0.bias"):
        pass


def test_tied_parameters_are_one() -> None:
    model = Net()
    model.blocks[2] = model.blocks[0]
    engine = engine_of(copy.deepcopy(model), precision="fp32")
    with engine.full_parameters() as inside:
        assert inside.blocks[2][0].weight is inside.blocks[0][0].weight
        inside.blocks[2][0].weight.data.zero_()
    assert not engine.state_dict()["blocks.0.0.weight"].any()


def _zero_and_fail(model: Any) -> None:
    model.blocks[0][0].weight.data.zero_()
    raise ZeroDivisionError
