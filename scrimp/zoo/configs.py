"""Configurations and presets of the models. Torch is not loaded, so that the command line checks settings at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from scrimp.errors import ScrimpError
from scrimp.zoo._settings import DEEPEST, Checked, flag, number, one_of, only_python, settings_of, whole, widths

if TYPE_CHECKING:
    from torch import Tensor

    # Of the head's input, the head's weight and the targets; the loss makes and keeps the logits itself.
    HeadLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

FUSED, EAGER = "fused", "eager"  # attention by one kernel, or by operators that make and save all scores


@dataclass(frozen=True, kw_only=True)
class GPTConfig(Checked):
    vocab: int = whole(50257)
    seq: int = whole(1024)
    dim: int = whole(768)
    heads: int = whole(12)
    layers: int = whole(12, most=DEEPEST)
    expansion: int = whole(4)
    dropout: float = number(0.0, below=1)
    tie: bool = flag(True)
    attention: str = one_of(FUSED, FUSED, EAGER)
    head_loss: HeadLoss | None = only_python(None)  # noqa: RUF009

    def __post_init__(self) -> None:
        super().__post_init__()
        _even_heads(self.dim, self.heads)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(Checked):
    vocab: int = whole(32000)
    seq: int = whole(4096)
    dim: int = whole(4096)
    heads: int = whole(32)
    kv_heads: int = whole(32)
    layers: int = whole(32, most=DEEPEST)
    hidden: int = whole(11008)
    theta: float = number(10000.0, above=True)
    eps: float = number(1e-5, above=True)
    head_loss: HeadLoss | None = only_python(None)  # noqa: RUF009

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise ValueError(f"dim {self.dim} over heads {self.heads} must be a whole, even number: rotations act on pairs")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")


@dataclass(frozen=True, kw_only=True)
class BertConfig(Checked):
    vocab: int = whole(30522)
    seq: int = whole(512)
    dim: int = whole(768)
    heads: int = whole(12)
    layers: int = whole(12, most=DEEPEST)
    segments: int = whole(2)
    expansion: int = whole(4)
    dropout: float = number(0.0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _even_heads(self.dim, self.heads)


@dataclass(frozen=True, kw_only=True)
class ViTConfig(Checked):
    classes: int = whole(1000)
    image: int = whole(224)
    patch: int = whole(16)
    dim: int = whole(768)
    heads: int = whole(12)
    layers: int = whole(12, most=DEEPEST)
    expansion: int = whole(4)
    dropout: float = number(0.0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image % self.patch:
            raise ValueError(f"image {self.image} is not a multiple of patch {self.patch}")
        _even_heads(self.dim, self.heads)


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(Checked):
    """`stages`: number of blocks at each resolution. The small stem keeps the resolution of small images."""

    block: Literal["basic", "bottleneck"] = one_of("bottleneck", "basic", "bottleneck")
    stages: tuple[int, ...] = widths((3, 4, 6, 3), most=DEEPEST)
    width: int = whole(64)
    stem: Literal["large", "small"] = one_of("large", "large", "small")
    classes: int = whole(1000)
    image: int = whole(224)


@dataclass(frozen=True, kw_only=True)
class VGGConfig(Checked):
    """`stages`: widths of the convolutions at each resolution; each stage ends in a max pool that halves it."""

    stages: tuple[tuple[int, ...], ...] = widths(((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3), nested=True)
    batch_norm: bool = flag(False)
    hidden: int = whole(4096)
    dropout: float = number(0.0, below=1)
    classes: int = whole(1000)
    image: int = whole(224)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image % 2 ** len(self.stages):
            raise ValueError(f"image {self.image} cannot be halved by each of {len(self.stages)} stages")


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Checked):
    """`expert_parallel`: over how many devices a plan may split the experts. Each doubling takes up to twice the memory for
    dispatched tokens, because every device has room for all tokens."""

    vocab: int = whole(50257)
    seq: int = whole(1024)
    dim: int = whole(768)
    heads: int = whole(12)
    layers: int = whole(12, most=DEEPEST)
    experts: int = whole(8)
    chosen: int = whole(2)
    expert_parallel: int = whole(1)
    expansion: int = whole(4)
    balance: float = number(0.01)  # the weight of the extra loss
    dropout: float = number(0.0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        _even_heads(self.dim, self.heads)
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"cannot choose {self.chosen} of {self.experts} experts")
        if self.experts % self.expert_parallel:
            raise ValueError(f"experts {self.experts} is not a multiple of expert_parallel {self.expert_parallel}")


def _even_heads(dim: int, heads: int) -> None:
    if dim % heads:
        raise ValueError(f"dim {dim} is not a multiple of heads {heads}")


Config: TypeAlias = GPTConfig | LlamaConfig | BertConfig | ViTConfig | ResNetConfig | VGGConfig | MoEConfig

_TINY: tuple[tuple[int, ...], ...] = ((8,), (16,), (16, 32))

PRESETS: Mapping[str, Config] = {
    # The sizes of the GPT-3 paper, under their usual names; 13b has dim 5120 where the paper prints 5140 for 40 heads of 128.
    "gpt-tiny": GPTConfig(vocab=64, seq=32, dim=32, heads=4, layers=2),
    "gpt-125m": GPTConfig(),
    "gpt-350m": GPTConfig(dim=1024, heads=16, layers=24),
    "gpt-1b3": GPTConfig(seq=2048, dim=2048, heads=16, layers=24),
    "gpt-2b7": GPTConfig(seq=2048, dim=2560, heads=32, layers=32),
    "gpt-6b7": GPTConfig(seq=2048, dim=4096, heads=32, layers=32),
    "gpt-13b": GPTConfig(seq=2048, dim=5120, heads=40, layers=40),
    "gpt-175b": GPTConfig(seq=2048, dim=12288, heads=96, layers=96),
    "llama-tiny": LlamaConfig(vocab=64, seq=32, dim=32, heads=4, kv_heads=2, layers=2, hidden=88),
    "llama-7b": LlamaConfig(),
    "llama-13b": LlamaConfig(dim=5120, heads=40, kv_heads=40, layers=40, hidden=13824),
    "llama-8b": LlamaConfig(vocab=128256, seq=8192, kv_heads=8, hidden=14336, theta=500000.0),
    "llama-70b": LlamaConfig(
        vocab=128256, seq=8192, dim=8192, heads=64, kv_heads=8, layers=80, hidden=28672, theta=500000.0
    ),
    "llama-405b": LlamaConfig(
        vocab=128256, seq=8192, dim=16384, heads=128, kv_heads=8, layers=126, hidden=53248, theta=500000.0
    ),
    "bert-tiny": BertConfig(vocab=64, seq=32, dim=32, heads=4, layers=2),
    "bert-base": BertConfig(),
    "bert-large": BertConfig(dim=1024, heads=16, layers=24),
    "vit-tiny": ViTConfig(classes=10, image=32, patch=8, dim=32, heads=4, layers=2),
    "vit-s16": ViTConfig(dim=384, heads=6),
    "vit-b16": ViTConfig(),
    "vit-l16": ViTConfig(dim=1024, heads=16, layers=24),
    "resnet-tiny": ResNetConfig(block="basic", stages=(1, 1), width=8, stem="small", classes=10, image=32),
    "resnet18": ResNetConfig(block="basic", stages=(2, 2, 2, 2)),
    "resnet50": ResNetConfig(),
    "vgg-tiny": VGGConfig(stages=_TINY, hidden=64, classes=10, image=32),
    "vgg-tiny-bn": VGGConfig(stages=_TINY, batch_norm=True, hidden=64, classes=10, image=32),
    "vgg16": VGGConfig(dropout=0.5),
    "vgg16-bn": VGGConfig(batch_norm=True, dropout=0.5),
    "moe-tiny": MoEConfig(vocab=64, seq=32, dim=32, heads=4, layers=2, experts=4, expansion=2),
    "moe-8x125m": MoEConfig(),
}  # fmt: skip


def names() -> list[str]:
    """All names that `build` knows, small models first within a family."""
    return list(PRESETS)


def config(name: str, **overrides: object) -> Config:
    """The configuration behind a name, with some fields replaced."""
    preset = _preset(name)
    _known(name, preset, overrides)
    try:
        return replace(preset, **overrides)  # type: ignore[arg-type]  # the names are checked, and `Checked` checks the values
    except ValueError as error:
        given = ", ".join(f"{key}={value}" for key, value in overrides.items())
        raise ScrimpError(f"{name} with {given}: {error}") from error


def read(name: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Parses settings that are given as text, to override those of a preset; checks each, and all together."""
    preset = _preset(name)
    _known(name, preset, texts)
    settings = settings_of(preset)
    found = {key: settings[key].read(text.strip()) for key, text in texts.items()}
    for key, value in found.items():
        if not settings[key].accepts(value):
            raise ScrimpError(
                f"{name} with {key}={texts[key]}: {key} is {settings[key].words}; {name} has {_text(getattr(preset, key))}"
            )
    config(name, **found)
    return found


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ("/" if value and isinstance(value[0], tuple) else ",").join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _preset(name: str) -> Config:
    if name not in PRESETS:
        near = get_close_matches(name, names(), 3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ScrimpError(f"the zoo has no model '{name}'; it has {', '.join(names())}{hint}")
    return PRESETS[name]


def _known(name: str, preset: Config, given: Mapping[str, object]) -> None:
    known = [*settings_of(preset)]
    unknown = sorted(given.keys() - {*known})
    if unknown:
        near = [each for one in unknown for each in get_close_matches(one, known, 2)]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ScrimpError(f"{name} has no setting {', '.join(unknown)}; it has {', '.join(known)}{hint}")
