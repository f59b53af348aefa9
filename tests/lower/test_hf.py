"""Plans of Hugging Face models on all ranks of a mesh: tied weights, values that several layers read, masks, labels left out."""

from __future__ import annotations

import warnings
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import Plan, plan
from tests.support import capture_models
from tests.support.lowering.run import Ran, drawn, on_all_ranks, plainly, worst_of

transformers = pytest.importorskip("transformers")

WAYS: dict[str, dict[str, Any]] = {"least": {}, "fast": {"objective": "time"}, "kept": {"activations": {"keep"}}}


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def qwen2() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2Config(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    return transformers.Qwen2ForCausalLM(config)  # type: ignore[no-any-return]


@cache
def model_of(family: str) -> tuple[nn.Module, Any, Ran]:
    torch.manual_seed(0)
    if family in capture_models.FAMILIES:
        model, batch = capture_models.build(family), capture_models.batch(family, 8)
    else:
        model = {"t5": t5, "qwen2": qwen2}[family]()
        tokens = torch.randint(0, 64, (8, 16))
        labels = tokens.clone()
        labels[0, :7] = -100
        batch = {"input_ids": tokens, "labels": labels}
    model.train()
    return model, batch, plainly(model, batch)


@cache
def planned(family: str, way: str) -> Plan:
    model, batch, _ = model_of(family)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(model, batch, "4xCPU", mesh="x=2,y=2", precision="fp32", time_limit=2, gap=0.05, **WAYS[way])


def check(family: str, found: Plan) -> None:
    model, batch, wanted = model_of(family)
    ran = on_all_ranks(found, planned(family, "least").source.graph, model, batch)
    for each in ran:
        assert each.loss == pytest.approx(wanted.loss, rel=1e-6)
        assert worst_of(each, wanted) < (1e-5, "")
    assert max(each.peak_nbytes for each in ran) <= 1.01 * found.memory.peak_nbytes


@pytest.mark.parametrize("family", [*capture_models.FAMILIES, "t5", "qwen2"])
@pytest.mark.parametrize("way", [*WAYS, "drawn"])
def test_hugging_face_models_give_the_numbers_and_the_bytes(family: str, way: str) -> None:
    check(family, drawn(planned(family, "least"), Random(0)) if way == "drawn" else planned(family, way))
