"""Gradients of weights that several layers use, where such a gradient is read again after it was taken."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp import SGD, Engine

LR = 0.5


class After(nn.Module):
    """The gradient of what is added last is the gradient of the output, which goes on backward."""

    def __init__(self, added: nn.Parameter) -> None:
        super().__init__()
        self.added, self.linear = added, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.added


class Before(After):
    """The gradient of what is added first is the gradient of the input, which the layer before reads."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x + self.added))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        added = nn.Parameter(torch.randn(8, 8))
        self.layers = nn.ModuleList([After(added), Before(added)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize(("precision", "unit"), [("fp32", 2.0**-24), ("bf16", 2.0**-8)])
def test_a_gradient_that_is_read_on_is_not_added_to(precision: str, unit: float) -> None:
    """Fewer than sixteen operators and a sum over 8 products lie between the loss and a gradient: 24 roundings. Master weights
    are fp32, so their difference is off by a rounding of fp32."""
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(8, 8)
    plain = copy.deepcopy(model)
    before = {name: each.detach().clone() for name, each in plain.named_parameters()}
    plain(x).backward()
    plan = scrimp.plan(
        copy.deepcopy(model), {"x": x}, "1xCPU", mesh="x=1", precision=precision, optimizer="sgd", time_limit=2,
        activations=("keep",),
    )  # fmt: skip
    engine = Engine(model, plan=plan, optimizer=SGD(lr=LR), precision=precision, device="cpu")
    engine.step(x=x)
    after = engine.state_dict()
    for name, each in plain.named_parameters():
        assert each.grad is not None
        found = (before[name] - after[name]) / LR
        bound = 24 * unit * float(each.grad.norm()) + 2 * 2.0**-24 / LR * float(before[name].norm())
        assert float((found - each.grad).norm()) <= bound, name
