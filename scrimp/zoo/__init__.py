"""Reference models, and data they can learn from that needs no download.

The models are ordinary modules: they know nothing of scrimp. A loss is what `forward(inputs, targets)` returns. They may be
built on `meta`: every module that holds parameters or buffers fills its own in `reset_parameters`, and nothing else does.

Models are loaded when first used, so that `config` and `names` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    from scrimp.zoo._build import build, example_batch
    from scrimp.zoo.bert import Bert
    from scrimp.zoo.gpt import GPT
    from scrimp.zoo.grammar import Grammar
    from scrimp.zoo.images import Images
    from scrimp.zoo.llama import Llama
    from scrimp.zoo.moe import MoE
    from scrimp.zoo.resnet import ResNet
    from scrimp.zoo.vgg import VGG
    from scrimp.zoo.vit import ViT

__all__ = [
    "GPT", "VGG", "Bert", "BertConfig", "Config", "GPTConfig", "Grammar", "Images", "Llama", "LlamaConfig", "MoE", "MoEConfig",
    "ResNet", "ResNetConfig", "VGGConfig", "ViT", "ViTConfig", "build", "config", "example_batch", "names",
]  # fmt: skip

_HOME = {
    "Bert": "bert", "GPT": "gpt", "Grammar": "grammar", "Images": "images", "Llama": "llama", "MoE": "moe", "ResNet": "resnet",
    "VGG": "vgg", "ViT": "vit", "build": "_build", "example_batch": "_build",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'scrimp.zoo' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"scrimp.zoo.{_HOME[name]}"), name)
    globals()[name] = value
    return value
