"""What the contenders of `make bench-memory` train: the same model on the same batch for everybody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scrimp import zoo

LINEAR = "linear"
DENSITY = 0.01
# Of the zoo, under the names of the real ones: a classifier and activations that weigh about as much as each other.
SMALL: Mapping[str, tuple[str, dict[str, Any]]] = {
    "vgg16": ("vgg-tiny", {"image": 64, "hidden": 512}),
    "resnet50": ("resnet-tiny", {"image": 64, "width": 16, "stages": (2, 2)}),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`model_name`: "linear", which is layers of weights and nearly nothing else, or one of the zoo. `small`: for a CPU.
    `model()`, `rate` and `momentum` are what `bench.network.contenders` asks of a case."""

    model_name: str = LINEAR
    device: str = "cpu"
    small: bool = False
    precision: str = "fp32"
    batch: int = 8
    rate: float = 1e-2
    momentum: float = 0.9
    layers: int = 12  # of the linear ones
    steps: int = 5  # PowerSGD begins after two; the first ones make what is kept

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def model(self, device: str | None = None) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device or self.device):
            if self.model_name == LINEAR:
                return Linears(width=1500 if self.small else 3000, layers=self.layers)
            name, overrides = self._zoo()
            return zoo.build(name, **overrides)

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        """On the CPU. What is learnt does not matter here: a large batch is a smaller one again and again."""
        if self.model_name == LINEAR:
            return (torch.randn(batch, self.model("meta").width, generator=torch.Generator().manual_seed(0)),)  # type: ignore[arg-type]
        name, overrides = self._zoo()
        some = zoo.example_batch(name, min(batch, 32), **overrides)
        return tuple(each.repeat(-(-batch // len(each)), *[1] * (each.dim() - 1))[:batch].clone() for each in some)

    def weights_nbytes(self) -> int:
        """In fp32, whatever is computed in."""
        return 4 * sum(parameter.numel() for parameter in self.model("meta").parameters())

    def _zoo(self) -> tuple[str, dict[str, Any]]:
        return SMALL[self.model_name] if self.small else (self.model_name, {})


class Linear(nn.Linear):
    """Keeps the size of what passes through it, so that all layers of a deep stack learn."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)


class Linears(nn.Module):
    """Square layers without bias, 432 MB if there are 12 of a width of 3000; its forward is a loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
