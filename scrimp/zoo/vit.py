"""ViT: an image cut into patches, a class token before them, an encoder with LayerNorm first, a linear classifier."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp.zoo.configs import ViTConfig
from scrimp.zoo.gpt import MLP


class Patches(nn.Module):
    """Images to rows of tokens: the class token, then the patches, each with its learned position."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        count = (config.image // config.patch) ** 2
        self.first = nn.Parameter(torch.empty(1, 1, config.dim))
        self.positions = nn.Parameter(torch.empty(1, 1 + count, config.dim))
        # Before the convolution: a walk over modules visits the parent first, and the random draws should come in that order.
        self.reset_parameters()
        self.project = nn.Conv2d(3, config.dim, config.patch, stride=config.patch)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.first, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.project(images).flatten(2).transpose(1, 2)
        return torch.cat((self.first.expand(len(images), -1, -1), patches), 1) + self.positions


class Attention(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, dim = x.shape
        q, k, v = self.qkv(x).view(batch, count, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, count, dim))
        return y


class Block(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = MLP(config.dim, config.expansion * config.dim)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        x = x + self.drop(self.mlp(self.norm2(x)))
        return x


class ViT(nn.Module):
    """`forward(images)` gives logits, `forward(images, labels)` the mean cross-entropy."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = Patches(config)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.drop(self.patches(images))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits if labels is None else F.cross_entropy(logits.float(), labels)
