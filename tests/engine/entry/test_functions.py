"""`engine.backward(fn, ...)` and `engine.step(fn, ...)`, losses that are summed, and gradients that are discarded."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import zoo
from scrimp.chunks.tables.optimizers import AdamW
from scrimp.engine import Engine
from scrimp.errors import RunError
from tests.engine.test_engine import LR, adamw, assert_same

STEPS = 3


@cache
def _model() -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("gpt-tiny", layers=2)


def model_of() -> nn.Module:
    return copy.deepcopy(_model())


def parts_of(step: int) -> list[Any]:
    """Uneven micro-batches: of 1, 2 and 3 sequences of different lengths."""
    return [
        tuple(tensor[:, : 32 - 4 * k] for tensor in zoo.example_batch("gpt-tiny", batch=k + 1, step=10 * step + k))
        for k in range(3)
    ]


def engine_for(model: nn.Module, memory: str | int = "1GiB", **settings: Any) -> Engine:
    return Engine(model, optimizer=AdamW(lr=LR), memory=memory, device="cpu", precision="fp32", **settings)


def scaled(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    """The summands of a mean over all tokens of a step, and a second forward of a part of the batch."""
    loss: torch.Tensor = model(tokens, labels) * (tokens.numel() / count)
    return loss + 0.01 * model(tokens[:1], labels[:1]) / 3


def plainly(steps: int = STEPS) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    model = model_of()
    optimizer, losses = adamw(list(model.parameters())), []
    for step in range(steps):
        parts = parts_of(step)
        count, row = sum(tokens.numel() for tokens, _ in parts), []
        for tokens, labels in parts:
            loss = scaled(model, tokens, labels, count)
            loss.backward()  # type: ignore[no-untyped-call]
            row.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(row)
    return model.state_dict(), losses


@pytest.mark.parametrize("memory", ["1GiB", "tight"])
def test_a_function_with_losses_that_are_summed(memory: str) -> None:
    """Any number of micro-batches of any shapes, and a function that calls the model twice: plain PyTorch's weights."""
    want, losses = plainly()
    if memory == "tight":
        probe = engine_for(model_of(), micro_batches=2, reduction="sum", activations="recompute,offload")
        for tokens, labels in parts_of(0):
            probe.backward(scaled, probe._run.model, tokens, labels, 100)
        probe.update()
        memory = str(int(1.05 * probe.ledger.peak_nbytes))
    model = model_of()
    engine = engine_for(model, int(memory) if memory.isdigit() else memory, micro_batches=2, reduction="sum")
    for step in range(STEPS):
        parts = parts_of(step)
        count = sum(tokens.numel() for tokens, _ in parts)
        found = [float(engine.backward(scaled, model, tokens, labels, count)) for tokens, labels in parts]
        assert found == losses[step]
        engine.update()
    assert_same(engine.state_dict(), want)


def test_a_step_of_a_function_is_one_of_the_model() -> None:
    """With the batch split into micro-batches, and as a sum."""
    batch, model = zoo.example_batch("gpt-tiny", batch=4), model_of()
    by_model, by_function = engine_for(model_of(), micro_batches=2), engine_for(model, micro_batches=2)
    assert float(by_model.step(*batch)) == float(by_function.step(lambda *args: model(*args), *batch))
    assert_same(by_function.state_dict(), by_model.state_dict())
    summed = engine_for(model_of(), micro_batches=2, reduction="sum", clip_norm=1e9)
    mean = engine_for(model_of(), micro_batches=2, clip_norm=1e9)
    assert float(summed.step(*batch)) == 2 * float(mean.step(*batch))
    assert summed.optimizer.norm == 2 * mean.optimizer.norm  # type: ignore[operator]


def test_gradients_are_discarded() -> None:
    want, _ = plainly(1)
    model = model_of()
    engine = engine_for(model, micro_batches=2, reduction="sum")
    engine.zero_grad()
    engine.backward(scaled, model, *parts_of(7)[1], 50)
    engine.zero_grad()
    with pytest.raises(RunError, match=r"has no gradients.*call engine\.backward"):
        engine.update()
    parts = parts_of(0)
    count = sum(tokens.numel() for tokens, _ in parts)
    for tokens, labels in parts:
        engine.backward(scaled, model, tokens, labels, count)
    engine.update()
    assert_same(engine.state_dict(), want)


def test_what_a_function_must_do() -> None:
    model = model_of()
    engine = engine_for(model)
    tokens, labels = parts_of(0)[0]
    with pytest.raises(RunError, match="or the function in its place, returned str"):
        engine.backward(lambda tokens: "no loss", tokens)
    with pytest.raises(RunError):
        engine.backward(lambda *batch: model(*batch).backward(), tokens, labels)
    with pytest.raises(RunError, match=r"no trained parameter got a gradient"):
        engine.backward(lambda tokens: torch.ones((), requires_grad=True) * 2, tokens)
    assert float(engine.step(tokens, labels)) > 0
    with pytest.raises(RunError, match=r"reduction='total' is neither 'mean' nor 'sum'"):
        engine_for(model_of(), reduction="total")


def test_state_by_names() -> None:
    """By name or pattern: in the order of the model; what does not exist is named with the nearest that does."""
    engine = engine_for(model_of())
    whole = engine.state_dict()
    names = [*whole][:3]
    assert [*engine.state_dict(*names)] == names
    pattern = names[0].split(".")[0] + ".*"
    assert {*engine.state_dict(pattern)} == {name for name in whole if name.startswith(names[0].split(".")[0] + ".")}
    assert all(torch.equal(value, whole[name]) for name, value in engine.iter_state(names[1]))
    with pytest.raises(RunError, match=rf"'{names[0]}x' matches no parameter or buffer; nearest: '{names[0]}'"):
        engine.state_dict(names[0] + "x")


def test_a_parameter_tells_the_engines_device() -> None:
    """So that inputs are made where the model will run."""
    model = model_of()
    engine_for(model)
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cpu")}
