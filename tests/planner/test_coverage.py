"""Every model on every mesh: no operator is kept whole, the plan counts as the solver said, and its peak is near the floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import plan, zoo
from scrimp.planner import evaluate
from tests.support import capture_models

# Devices, mesh: 32 rows divide over all of them.
MESHES = {"8": (8, "x=8"), "2x4": (8, "x=2,y=4"), "4x8": (32, "x=4,y=8"), "2x2x2": (8, "x=2,y=2,z=2")}
BATCH, SECONDS = 32, 120.0
# Hugging Face's tiny ones have sizes that divide over 8 and over 4 x 8.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 32, "n_embd": 64, "n_head": 8, "vocab_size": 128},
    "llama": {**WIDE, "num_key_value_heads": 8, "vocab_size": 128},
    "bert": {**WIDE, "vocab_size": 128},
    "vit": WIDE,
    "resnet": {"embedding_size": 16, "hidden_sizes": [16, 32]},
    "mixtral": {**WIDE, "num_key_value_heads": 8, "vocab_size": 128},
}
QUICK = {("gpt2", 2, "2x4"), ("llama", 2, "8"), ("bert", 2, "8"), ("vit", 2, "8"), ("mixtral", 2, "8")}
QUICK_ZOO = {("gpt-tiny", "8"), ("moe-tiny", "8"), ("vgg-tiny-bn", "2x4"), ("vit-tiny", "2x4"), ("resnet-tiny", "8")}


def covered(model: nn.Module, batch: Sequence[Any] | Mapping[str, Any], on: str) -> None:
    devices, mesh = MESHES[on]
    found = plan(model, batch, f"{devices}xA100-80", mesh=mesh, activations=("keep",), time_limit=SECONDS, memory=1 << 50)
    assert found.whole == ()
    again = evaluate(found.source.problem, found.source.solution.choice)
    assert (again.peak_nbytes, again.seconds) == (found.memory.peak_nbytes, found.seconds)
    # Sizes that the axes do not divide (four experts, 16 channels) cannot be there once: then it is near what no plan is below.
    assert found.memory.peak_nbytes <= max(1.1 * found.memory.floor_nbytes, 1.3 * found.bound_nbytes)
    assert len(found.source.graph.layers) == sum(layers.count for layers in found.layers)


def marked(quick: bool, *values: object) -> Any:
    return pytest.param(*values, marks=() if quick else (pytest.mark.full,), id="-".join(map(str, values)))


@pytest.mark.parametrize(
    ("family", "layers", "on"),
    [
        marked((family, layers, on) in QUICK, family, layers, on)
        for family in capture_models.FAMILIES
        for layers in (2, 12)
        for on in MESHES
    ],
)
def test_models_of_hugging_face(family: str, layers: int, on: str) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = capture_models.build(family, layers, **SIZES[family])
    covered(model, capture_models.batch(family, BATCH), on)


@pytest.mark.parametrize(
    ("name", "on"), [marked((name, on) in QUICK_ZOO, name, on) for name in zoo.names() if "tiny" in name for on in MESHES]
)
def test_small_models_of_the_zoo(name: str, on: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name)
    covered(model, zoo.example_batch(name, BATCH), on)


@pytest.mark.parametrize("on", [marked(False, on) for on in MESHES])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "moe-tiny"])
def test_deep_models_of_the_zoo(name: str, on: str) -> None:
    with torch.device("meta"):
        model = zoo.build(name, layers=12)
    covered(model, zoo.example_batch(name, BATCH, layers=12), on)


@pytest.mark.full
@pytest.mark.parametrize("on", MESHES)
@pytest.mark.parametrize("name", [name for name in zoo.names() if "tiny" not in name])
def test_large_models_of_the_zoo(name: str, on: str) -> None:
    """None of their weights are made."""
    with torch.device("meta"):
        model = zoo.build(name)
        batch = zoo.example_batch(name, BATCH)
    covered(model, batch, on)
