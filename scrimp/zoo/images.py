"""Generated images with labels: stripes in a colour, with noise.

A class has an angle, a pitch and a colour. The stripes' offset is random, so no single pixel tells the class: a model must
compare neighbours, which small convolutions do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scrimp.zoo.grammar import generator

NOISE = 0.5


class Images:
    """`seed` chooses the classes. Equal arguments give equal images; a larger batch begins with the smaller one."""

    def __init__(self, classes: int = 10, size: int = 32, seed: int = 0) -> None:
        self.classes = classes
        self.size = size
        self.seed = seed
        with torch.device("cpu"):
            luck = torch.rand(classes, 4, generator=generator("classes", classes, seed))
            angle = math.pi * torch.arange(classes) / classes
            waves = 2 * math.pi * (2 + 4 * luck[:, 0])  # stripes in an image: 2 to 6
            self._slope = torch.stack((angle.cos() * waves, angle.sin() * waves), 1)
            self._colour = 2 * luck[:, 1:] - 1
            self._colour /= self._colour.norm(dim=1, keepdim=True)

    def batch(self, n: int, step: int = 0) -> tuple[Tensor, Tensor]:
        """Images (n, 3, size, size) in float32 and labels (n,) in int64."""
        with torch.device("cpu"):
            luck = torch.rand(n, 3, generator=generator("images", self.seed, step))
            noise = torch.rand(n, 3, self.size, self.size, generator=generator("noise", self.seed, step))
            labels = (luck[:, 0] * self.classes).long()
            along = torch.arange(self.size) / self.size
            slope = self._slope[labels]
            phase = slope[:, 0, None, None] * along[:, None] + slope[:, 1, None, None] * along
            stripes = (phase + 2 * math.pi * luck[:, 1, None, None]).sin() * (0.5 + luck[:, 2, None, None])
            return stripes[:, None] * self._colour[labels][:, :, None, None] + NOISE * (2 * noise - 1), labels
