"""Builds models and example batches by preset name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from scrimp.zoo.bert import Bert
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
)
from scrimp.zoo.gpt import GPT
from scrimp.zoo.grammar import Grammar
from scrimp.zoo.images import Images
from scrimp.zoo.llama import Llama
from scrimp.zoo.moe import MoE
from scrimp.zoo.resnet import ResNet
from scrimp.zoo.vgg import VGG
from scrimp.zoo.vit import ViT

_MODELS: Mapping[type[Config], Callable[..., nn.Module]] = {
    GPTConfig: GPT, LlamaConfig: Llama, BertConfig: Bert, ViTConfig: ViT, ResNetConfig: ResNet, VGGConfig: VGG, MoEConfig: MoE,
}  # fmt: skip

_WORDS = 64  # the most tokens example texts use, however large the vocabulary of the model

_grammar = functools.cache(Grammar)
_images = functools.cache(Images)


def build(name: str, **overrides: object) -> nn.Module:
    """A new model, such as `build("gpt-125m", layers=2)`, from torch's default generator, on torch's default device."""
    chosen = config(name, **overrides)
    return _MODELS[type(chosen)](chosen)


def example_batch(name: str, batch: int = 2, step: int = 0, **overrides: object) -> tuple[Tensor, ...]:
    """Inputs of the model's forward that returns a loss, on the CPU; different for each step. Give the overrides given to
    `build`."""
    chosen = config(name, **overrides)
    match chosen:
        case GPTConfig() | LlamaConfig() | MoEConfig():
            return _grammar(vocab=min(_WORDS, chosen.vocab)).batch(batch, chosen.seq, step)
        case BertConfig():
            mask = chosen.vocab - 1
            return _grammar(vocab=min(_WORDS, mask)).masked(batch, chosen.seq, step, mask=mask)
        case ViTConfig() | ResNetConfig() | VGGConfig():
            return _images(classes=chosen.classes, size=chosen.image).batch(batch, step)


def example_on_meta(name: str, batch: int, **overrides: object) -> tuple[Tensor, ...]:
    """Shapes and dtypes of `example_batch`, of any size, on meta: nothing is allocated."""
    chosen = config(name, **overrides)
    sizes: list[tuple[tuple[int, ...], torch.dtype]]
    match chosen:
        case GPTConfig() | LlamaConfig() | MoEConfig() | BertConfig():
            sizes = [((batch, chosen.seq), torch.int64)] * 2
        case ViTConfig() | ResNetConfig() | VGGConfig():
            sizes = [((batch, 3, chosen.image, chosen.image), torch.float32), ((batch,), torch.int64)]
    return tuple(torch.empty(size, dtype=dtype, device="meta") for size, dtype in sizes)
