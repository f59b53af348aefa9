"""VGG, with and without batch norm: plain convolutions, then a classifier that holds nine tenths of the parameters."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp.zoo.configs import VGGConfig
from scrimp.zoo.resnet import Conv


class Stage(nn.Sequential):
    def __init__(self, inputs: int, widths: tuple[int, ...], batch_norm: bool) -> None:
        parts: list[nn.Module] = []
        for width in widths:
            parts.append(Conv(inputs, width, 3, padding=1))
            if batch_norm:
                parts.append(nn.BatchNorm2d(width))
            parts.append(nn.ReLU())
            inputs = width
        super().__init__(*parts, nn.MaxPool2d(2))


class VGG(nn.Module):
    """`forward(images)` gives logits, `forward(images, labels)` the mean cross-entropy."""

    def __init__(self, config: VGGConfig) -> None:
        super().__init__()
        self.config = config
        inputs = (3, *(widths[-1] for widths in config.stages))
        self.stages = nn.ModuleList(
            Stage(width, widths, config.batch_norm) for width, widths in zip(inputs, config.stages, strict=False)
        )
        side = config.image // 2 ** len(config.stages)
        self.hidden1 = nn.Linear(inputs[-1] * side * side, config.hidden)
        self.hidden2 = nn.Linear(config.hidden, config.hidden)
        self.drop = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden, config.classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = images
        for stage in self.stages:
            x = stage(x)
        x = self.drop(F.relu(self.hidden1(x.flatten(1))))
        x = self.drop(F.relu(self.hidden2(x)))
        logits: Tensor = self.head(x)
        return logits if labels is None else F.cross_entropy(logits.float(), labels)
