"""Models of many kinds have the bits of plain PyTorch, where all fits and at the least budget, in fp32 and bf16."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from scrimp import AdamW, Engine, FitError, Memory
from tests.support.many_models import CASES
from tests.support.reference import train_bf16, train_fp32

STEPS, LR = 3, 1e-3
# In `make test` every model runs once, in one of the four ways; `make test-full` runs all.
WAYS = [("fp32", "ample"), ("bf16", "least"), ("fp32", "least"), ("bf16", "ample")]
ALL = [
    pytest.param(name, *way, marks=() if at % 4 == number % 4 or (at == 2 and number % 4 == 0) else pytest.mark.full)
    for number, name in enumerate(CASES)
    for at, way in enumerate(WAYS)
]


@cache
def model_of(name: str, precision: str) -> Any:
    return CASES[name].model(precision)


def loss_of(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.loss


def engine_for(name: str, precision: str, device: str | int) -> Engine:
    model = copy.deepcopy(model_of(name, precision))
    return Engine(model, optimizer=AdamW(lr=LR), memory=Memory(device=device), precision=precision, device="cpu")


def trained(name: str, precision: str, device: str | int) -> tuple[Engine, list[float]]:
    engine = engine_for(name, precision, device)
    torch.manual_seed(3)
    return engine, [float(engine.step(*batch)) for batch in CASES[name].batches(STEPS)]


def at_least(name: str, precision: str) -> tuple[Engine, list[float]]:
    """Within what the engine itself says is the least."""
    budget: int | str = "1KiB"
    for _ in range(3):  # the weights of a layer, then a step, then steps whose shapes of activations differ
        try:
            return trained(name, precision, budget)
        except FitError as error:
            budget = error.least_nbytes or 0
    pytest.fail(f"{name}: {budget} is not the least after all")


@pytest.mark.parametrize(("name", "precision", "room"), ALL)
def test_bit_equal(name: str, precision: str, room: str) -> None:
    pytest.importorskip(CASES[name].needs)
    loop = train_fp32 if precision == "fp32" else train_bf16

    def adamw(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=LR, fused=True)

    model = model_of(name, precision)
    torch.manual_seed(3)
    want, losses = loop(model, CASES[name].batches(STEPS), adamw, loss_of=loss_of)
    engine, got = trained(name, precision, "1GiB") if room == "ample" else at_least(name, precision)
    assert got == losses
    state = engine.state_dict()
    wrong = [key for key in want if not torch.equal(state[key].float(), want[key].float())]
    assert not wrong, f"{len(wrong)} of {len(want)} differ: {wrong[:5]}"
