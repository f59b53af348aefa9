"""Routers that send every token to the same experts, the worst case of a dispatch."""

from __future__ import annotations

import torch
from torch import nn


def to_the_first_two(module: nn.Module) -> None:
    """Changes every mixture in a module: tokens with a positive mean get the largest score for expert 0, and the next for expert
    1. Layer norms before mixtures get such a mean."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("router.weight"):
                order = torch.arange(len(weight), 0, -1)
                weight.copy_((order / len(weight) / weight.shape[1])[:, None].expand_as(weight))
            elif name.endswith("norm2.bias"):
                weight.fill_(1.0)
