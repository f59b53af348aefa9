"""VGG, with and without batch norm: plain convolutions, then a classifier that holds nine tenths of the parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp.zoo.resnet import Conv


@dataclass(frozen=True, kw_only=True)
class VGGConfig:
    """`stages` holds the widths of the convolutions at each resolution; a max pool that halves it ends each stage."""

    stages: tuple[tuple[int, ...], ...] = ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3)
    batch_norm: bool = False
    hidden: int = 4096
    dropout: float = 0.0
    classes: int = 1000
    image: int = 224

    def __post_init__(self) -> None:
        if self.image % 2 ** len(self.stages):
            raise ValueError(f"image {self.image} cannot be halved by each of {len(self.stages)} stages")


_TINY: tuple[tuple[int, ...], ...] = ((8,), (16,), (16, 32))

PRESETS = {
    "vgg-tiny": VGGConfig(stages=_TINY, hidden=64, classes=10, image=32),
    "vgg-tiny-bn": VGGConfig(stages=_TINY, batch_norm=True, hidden=64, classes=10, image=32),
    "vgg16": VGGConfig(dropout=0.5),
    "vgg16-bn": VGGConfig(batch_norm=True, dropout=0.5),
}


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
