"""A small model of several files' worth of code, of which tests change one thing at a time."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from tests.capture.cache import keyed_helper

SCALE = 2.0
TABLE = {"twice": keyed_helper.twice}


def activation(x: Tensor) -> Tensor:
    return torch.relu(x) * SCALE


class Base(nn.Module):
    def mixed(self, x: Tensor) -> Tensor:
        return keyed_helper.shifted(x)


class Inner(Base):
    floor = 0.5

    def __init__(self, dim: int, *, name: str = "twice", settings: dict[str, object] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.name = name
        self.settings = settings or {"alpha": 1.0, "sizes": [1, 2, (3, 4)]}
        self.extra = functools.partial(torch.clamp, min=-1.0)

    def forward(self, x: Tensor) -> Tensor:
        return TABLE[self.name](self.extra(self.mixed(activation(self.linear(x))))) + self.floor


class Model(nn.Module):
    def __init__(self, dim: int = 4, layers: int = 2, **settings: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(dim, **settings) for _ in range(layers)])  # type: ignore[arg-type]
        self.head = nn.Linear(dim, dim)
        self.register_buffer("shift", torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) + self.shift).square().mean()
