"""Reference models, and data they can learn from that needs no download.

The models are ordinary modules: they know nothing of scrimp. A loss is what `forward(inputs, targets)` returns. They may be
built on `meta`: every module that holds parameters or buffers fills its own in `reset_parameters`, and nothing else does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import TypeAlias

from torch import Tensor, nn

from scrimp.errors import ScrimpError
from scrimp.zoo import bert, gpt, llama, moe, resnet, vgg, vit
from scrimp.zoo.bert import Bert, BertConfig
from scrimp.zoo.gpt import GPT, GPTConfig
from scrimp.zoo.grammar import Grammar
from scrimp.zoo.images import Images
from scrimp.zoo.llama import Llama, LlamaConfig
from scrimp.zoo.moe import MoE, MoEConfig
from scrimp.zoo.resnet import ResNet, ResNetConfig
from scrimp.zoo.vgg import VGG, VGGConfig
from scrimp.zoo.vit import ViT, ViTConfig

__all__ = [
    "GPT", "VGG", "Bert", "BertConfig", "Config", "GPTConfig", "Grammar", "Images", "Llama", "LlamaConfig", "MoE", "MoEConfig",
    "ResNet", "ResNetConfig", "VGGConfig", "ViT", "ViTConfig", "build", "config", "example_batch", "names",
]  # fmt: skip

Config: TypeAlias = GPTConfig | LlamaConfig | BertConfig | ViTConfig | ResNetConfig | VGGConfig | MoEConfig

_MODELS: Mapping[type[Config], Callable[..., nn.Module]] = {
    GPTConfig: GPT, LlamaConfig: Llama, BertConfig: Bert, ViTConfig: ViT, ResNetConfig: ResNet, VGGConfig: VGG, MoEConfig: MoE,
}  # fmt: skip

_PRESETS: Mapping[str, Config] = {
    **gpt.PRESETS, **llama.PRESETS, **bert.PRESETS, **vit.PRESETS, **resnet.PRESETS, **vgg.PRESETS, **moe.PRESETS,
}  # fmt: skip

_WORDS = 64  # the most tokens example texts use, however large the vocabulary of the model

_grammar = functools.cache(Grammar)
_images = functools.cache(Images)


def names() -> list[str]:
    """All names that `build` knows, small models first within a family."""
    return list(_PRESETS)


def config(name: str, **overrides: object) -> Config:
    """The configuration behind a name, with some fields replaced."""
    if name not in _PRESETS:
        near = get_close_matches(name, names(), 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ScrimpError(f"the zoo has no model '{name}'; it has {', '.join(names())}{hint}")
    preset = _PRESETS[name]
    known = [field.name for field in fields(preset)]
    unknown = sorted(overrides.keys() - known)
    if unknown:
        raise ScrimpError(f"{name} has no setting {', '.join(unknown)}; it has {', '.join(known)}")
    try:
        return replace(preset, **overrides)  # type: ignore[arg-type]  # the names are checked, the types are the caller's
    except ValueError as error:
        raise ScrimpError(f"{name} with {overrides}: {error}") from error


def build(name: str, **overrides: object) -> nn.Module:
    """`build("gpt-125m", layers=2)`: a fresh model, drawn from torch's default generator, on torch's default device."""
    chosen = config(name, **overrides)
    return _MODELS[type(chosen)](chosen)


def example_batch(name: str, batch: int = 2, step: int = 0, **overrides: object) -> tuple[Tensor, ...]:
    """What the model's forward takes to return a loss, on the CPU; each step another. Give the overrides given to `build`."""
    chosen = config(name, **overrides)
    match chosen:
        case GPTConfig() | LlamaConfig() | MoEConfig():
            return _grammar(vocab=min(_WORDS, chosen.vocab)).batch(batch, chosen.seq, step)
        case BertConfig():
            mask = chosen.vocab - 1
            return _grammar(vocab=min(_WORDS, mask)).masked(batch, chosen.seq, step, mask=mask)
        case ViTConfig() | ResNetConfig() | VGGConfig():
            return _images(classes=chosen.classes, size=chosen.image).batch(batch, step)
