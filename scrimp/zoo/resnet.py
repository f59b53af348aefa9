"""ResNet with batch norm: basic blocks (ResNet-18) or bottlenecks (ResNet-50, the stride on the 3x3 convolution)."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp.zoo.configs import ResNetConfig


class Conv(nn.Conv2d):
    """Initialised to keep the variance of gradients through ReLUs, which torch's default does not; deep stacks need it to
    train."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ConvNorm(nn.Module):
    """A convolution that keeps the size except for its stride, then batch norm."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = Conv(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y


class Block(nn.Module):
    """A basic block or a bottleneck: they differ only in their convolutions. The shortcut projects where shapes change."""

    def __init__(self, kind: Literal["basic", "bottleneck"], inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * expansion(kind)
        if kind == "basic":
            sizes = [(inputs, width, 3, stride), (width, outputs, 3, 1)]
        else:
            sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        self.convs = nn.ModuleList(ConvNorm(*size) for size in sizes)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, conv in enumerate(self.convs):
            y = conv(F.relu(y) if i else y)
        return F.relu(y + self.shortcut(x))


def expansion(kind: Literal["basic", "bottleneck"]) -> int:
    return 1 if kind == "basic" else 4


class ResNet(nn.Module):
    """`forward(images)` gives logits, `forward(images, labels)` the mean cross-entropy."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        large = config.stem == "large"
        self.stem = ConvNorm(3, config.width, 7, 2) if large else ConvNorm(3, config.width, 3)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        stages, inputs = [], config.width
        for i, count in enumerate(config.stages):
            width, blocks = config.width * 2**i, []
            for j in range(count):
                blocks.append(Block(config.block, inputs, width, stride=2 if i and not j else 1))
                inputs = width * expansion(config.block)
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(inputs, config.classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.pool(F.relu(self.stem(images)))
        for stage in self.stages:
            x = stage(x)
        # A mean, not adaptive pooling: the backward of that is not deterministic on CUDA.
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits if labels is None else F.cross_entropy(logits.float(), labels)
