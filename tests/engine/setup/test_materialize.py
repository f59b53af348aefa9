"""What is on meta is filled by the model's own means, and by nothing else; what nobody fills is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import zoo
from scrimp.engine import Engine, Memory
from scrimp.errors import RunError
from tests.engine.test_engine import everything


def state_of(model: nn.Module, **kwargs: Any) -> dict[str, torch.Tensor]:
    return everything(Engine(model, memory=Memory(device="1GiB"), device="cpu", **kwargs))


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = make()
    return model


@pytest.mark.parametrize("name", ["llama-tiny", "vgg-tiny", "resnet-tiny"])
def test_module_by_module_as_at_once(name: str) -> None:
    torch.manual_seed(5)
    plain = zoo.build(name)
    torch.manual_seed(5)
    got = state_of(on_meta(lambda: zoo.build(name)))
    want = {**plain.state_dict(), **dict(plain.named_buffers())}
    assert all(torch.equal(got[key], want[key]) for key in want)


class Own(nn.Module):
    """`_init_weights` fills some; a LayerNorm is left to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.empty(4))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3.0)
            module.bias.data.fill_(2.0)  # as old code does it
        if module is self:
            nn.init.constant_(self.scale, 4.0)


def test_a_models_own_way_comes_first() -> None:
    got = state_of(on_meta(Own))
    for name, value in {"first.weight": 3, "first.bias": 2, "norm.weight": 1, "norm.bias": 0, "scale": 4}.items():
        assert (got[name] == value).all(), name


class OtherInit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def _init_weights(self) -> None:
        raise AssertionError("takes no module: not the function that is meant")


def test_a_function_of_the_same_name_is_not_called() -> None:
    assert state_of(on_meta(OtherInit))["first.weight"].abs().max() <= 0.5


def test_attention_of_torch() -> None:
    got = state_of(on_meta(lambda: nn.MultiheadAttention(8, 2)))
    assert got["in_proj_weight"].std() > 0.1
    assert (got["in_proj_bias"] == 0).all()
    assert (got["out_proj.bias"] == 0).all()


def test_what_has_values_keeps_them() -> None:
    model = on_meta(Own)
    model.first.weight = nn.Parameter(torch.full((4, 4), 7.0))
    got = state_of(model)
    assert (got["first.weight"] == 7).all()
    assert (got["first.bias"] == 2).all()


@dataclass
class Config:
    size: int = 6


class Table(nn.Module):
    """Buffers that no file holds, made from a config as old rotary embeddings are."""

    def __init__(self, config: Config, device: Any = None) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("steps", torch.arange(config.size, device=device), persistent=False)
        self.register_buffer("even", torch.arange(config.size, device=device) % 2 == 0, persistent=False)
        self.register_buffer("third", torch.arange(config.size, device=device) / 3, persistent=False)


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table(Config())
        self.linear = nn.Linear(6, 6)


@pytest.mark.parametrize("given", [False, True])
def test_buffers_made_from_a_config(given: bool) -> None:
    plain = WithTable()
    got = state_of(on_meta(WithTable), weights=plain.state_dict() if given else None)
    for name, buffer in plain.named_buffers():
        assert torch.equal(got[name], buffer), name
    assert torch.equal(got["linear.weight"], plain.linear.weight) == given


class Lost(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.linear = nn.Linear(2, 2)
        if kind == "parameter":
            self.inner.lost = nn.Parameter(torch.ones(2))
        else:
            dtype = {"float": torch.float32, "int": torch.int64, "byte": torch.uint8, "bool": torch.bool}[kind]
            self.inner.register_buffer("lost", torch.ones(2, dtype=dtype), persistent=False)


@pytest.mark.parametrize("kind", ["parameter", "float", "int", "byte", "bool"])
def test_what_nobody_fills_is_named(kind: str) -> None:
    with pytest.raises(RunError, match=r"inner\.lost of Module are on meta, and nothing fills them.*build the model on the CPU"):
        state_of(on_meta(lambda: Lost(kind)))
    assert (state_of(Lost(kind))["inner.lost"] == 1).all()
