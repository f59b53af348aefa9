"""Layers: repeats by structure; every parameter owned once; shared ones known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scrimp import zoo
from scrimp.layers import find_layers
from tests.engine.test_engine import Odd


@pytest.mark.parametrize("name", zoo.names())
def test_every_parameter_has_one_owner(name: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
    layers = find_layers(model)
    owned = [parameter for layer in layers for parameter in layer.parameters]
    assert sorted(owned) == sorted(dict(model.named_parameters()))
    largest = max(sum(model.get_parameter(p).numel() for p in layer.parameters) for layer in layers)
    assert len(layers) > 2
    assert largest < sum(p.numel() for p in model.parameters())


def test_blocks_of_a_stack_are_layers() -> None:
    with torch.device("meta"):
        model = zoo.build("gpt-125m")
    paths = [layer.path for layer in find_layers(model)]
    assert [path for path in paths if path.startswith("blocks.")] == [f"blocks.{k}" for k in range(12)]


def test_tied_weights_are_shared_and_direct_parameters_a_layer_of_their_own() -> None:
    layers = {layer.path: layer for layer in find_layers(Odd())}
    assert layers["head"].shared == ("embed.weight",)
    assert layers["head"].parameters == ()
    assert layers[""].own
    assert layers[""].parameters == ("scale",)
    assert layers["blocks.1"].parameters == tuple(f"blocks.1.{k}.{p}" for k in (0, 2) for p in ("weight", "bias"))


def test_a_single_module_is_one_layer() -> None:
    assert [layer.path for layer in find_layers(nn.Linear(2, 2))] == [""]


def test_a_bare_container_is_no_layer() -> None:
    """A stack of one has no repeat, but nobody ever calls the ModuleList."""
    paths = [layer.path for layer in find_layers(zoo.build("gpt-tiny", layers=1))]
    assert "blocks" not in paths
    assert "blocks.0.mlp.up" in paths
