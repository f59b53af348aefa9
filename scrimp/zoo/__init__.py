"""Reference models, and generated data that they can learn from.

The models are ordinary modules without scrimp imports. `forward(inputs, targets)` returns the loss. They may be built on `meta`:
every module with parameters or buffers initialises its own in `reset_parameters`, and nothing else does.

Models are loaded when first used, so that `config` and `names` need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily
from scrimp.zoo.configs import (
    BertConfig,
    Config,
    GPTConfig,
    LlamaConfig,
    MoEConfig,
    ResNetConfig,
    VGGConfig,
    ViTConfig,
    config,
    names,
)

if TYPE_CHECKING:
    from scrimp.zoo._build import build, example_batch, example_on_meta
    from scrimp.zoo.bert import Bert
    from scrimp.zoo.gpt import GPT
    from scrimp.zoo.grammar import Grammar, generator
    from scrimp.zoo.images import Images
    from scrimp.zoo.llama import Llama
    from scrimp.zoo.moe import MoE
    from scrimp.zoo.resnet import ResNet
    from scrimp.zoo.vgg import VGG
    from scrimp.zoo.vit import ViT

__all__ = [
    "GPT", "VGG", "Bert", "BertConfig", "Config", "GPTConfig", "Grammar", "Images", "Llama", "LlamaConfig", "MoE", "MoEConfig",
    "ResNet", "ResNetConfig", "VGGConfig", "ViT", "ViTConfig", "build", "config", "example_batch", "example_on_meta",
    "generator", "names",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "Bert": "scrimp.zoo.bert",
        "GPT": "scrimp.zoo.gpt",
        "Grammar": "scrimp.zoo.grammar",
        "Images": "scrimp.zoo.images",
        "Llama": "scrimp.zoo.llama",
        "MoE": "scrimp.zoo.moe",
        "ResNet": "scrimp.zoo.resnet",
        "VGG": "scrimp.zoo.vgg",
        "ViT": "scrimp.zoo.vit",
        "build": "scrimp.zoo._build",
        "example_batch": "scrimp.zoo._build",
        "example_on_meta": "scrimp.zoo._build",
        "generator": "scrimp.zoo.grammar",
    },
)
