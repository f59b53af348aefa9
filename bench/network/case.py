"""What every contender of `make bench-network` trains: the same model from the same seed, on the same data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Case:
    """An MLP that tells noisy vectors apart. `batch`: of one rank. `steps`: timed ones of who sends every gradient whole;
    who sends little takes `longer` times as many, for it may need more of them to the same loss, `target`. `rate`: of
    learning, each contender's own (`python -m bench.network --tune`)."""

    mbit: int
    ranks: int = 4
    layers: int = 5
    width: int = 1024
    classes: int = 100
    noise: float = 5.0
    batch: int = 64
    warm_up: int = 5
    steps: int = 115
    longer: int = 2
    rate: float = 0.03
    momentum: float = 0.9
    target: float = 1.0
    seed: int = 0

    def shapes(self) -> list[tuple[int, ...]]:
        """Of all parameters."""
        return [tuple(parameter.shape) for parameter in self.model("meta").parameters()]

    def model(self, device: str = "cpu") -> nn.Module:
        torch.manual_seed(self.seed)
        made: list[nn.Module] = []
        with torch.device(device):
            for _ in range(self.layers):
                made += [nn.Linear(self.width, self.width), nn.LayerNorm(self.width), nn.ReLU()]
            return nn.Sequential(*made, nn.Linear(self.width, self.classes))

    def data(self, steps: int, rank: int) -> list[tuple[Tensor, Tensor]]:
        """What a rank is given, step by step; no two ranks get the same."""
        centres = torch.randn(self.classes, self.width, generator=torch.Generator().manual_seed(self.seed))
        luck = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + rank)
        found = []
        for _ in range(steps):
            labels = torch.randint(self.classes, (self.batch,), generator=luck)
            noisy = centres[labels] + self.noise * torch.randn(self.batch, self.width, generator=luck)
            found.append((noisy / (1 + self.noise**2) ** 0.5, labels))
        return found
