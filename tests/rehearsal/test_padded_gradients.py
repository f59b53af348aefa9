"""Gradients whose elements do not divide by their shares: each is copied into an array of equal shares before its reduction."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scrimp import plan, rehearse


class Square(nn.Module):
    """1024 x 1024 elements of a weight, which neither 3 nor 7 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


@pytest.mark.parametrize("devices", [3, 7])
def test_the_plan_counts_the_padded_copy(devices: int) -> None:
    with torch.device("meta"):
        model = Square()
    batch = {"x": torch.empty(2 * devices, 1024, device="meta")}
    found = plan(model, batch, f"{devices}xA100-80", mesh=f"x={devices}")
    assert 0.99 <= rehearse(found, model, batch).peak.nbytes / found.memory.peak_nbytes <= 1.01
