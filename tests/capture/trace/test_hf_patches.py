"""Capturing Hugging Face models, as they come."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scrimp.capture import Graph, capture, from_json, to_json
from scrimp.errors import CaptureError
from tests.capture.test_capture import assert_runs_like, counts
from tests.rank_jobs import hf as hf_jobs
from tests.support import capture_models as models

transformers = pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")

# layers, distinct graphs, operators of each graph, at a depth of 2; other versions may have some operators more or less
SAME_VERSION = transformers.__version__.startswith("5.22.")
GOLDEN = {
    "gpt2": (4, 3, (8, 89, 17)),
    "llama": (4, 3, (10, 163, 36)),
    "bert": (4, 3, (13, 88, 29)),
    "vit": (4, 3, (13, 88, 15)),
    "resnet": (5, 4, (9, 16, 37, 16)),
    "mixtral": (4, 3, (10, 209, 36)),
}


@cache
def case(family: str, layers: int) -> tuple[nn.Module, dict[str, Tensor], Graph]:
    torch.manual_seed(0)
    model, batch = models.build(family, layers), models.batch(family)
    return model, batch, capture(model, (), batch)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_layers_that_run_give_the_model_s_loss_and_gradients(family: str) -> None:
    model, batch, graph = case(family, 2)
    assert counts(graph)[:2] == GOLDEN[family][:2]
    assert not SAME_VERSION or counts(graph) == GOLDEN[family]
    assert from_json(to_json(graph)) == graph
    assert_runs_like(model, batch, graph)


@pytest.mark.parametrize("family", ["gpt2", *(pytest.param(family, marks=pytest.mark.full) for family in models.FAMILIES[1:])])
def test_depth_makes_no_graphs(family: str) -> None:
    model, batch, graph = case(family, 12)
    if family == "resnet":  # a stage's first block differs from its others, of which there now are several
        assert counts(graph) == (26, 5, (9, 16, 21, 16, 16))
    else:
        assert counts(graph) == (14, *GOLDEN[family][1:])
    assert_runs_like(model, batch, graph)


def masks(graph: Graph) -> list[tuple[int, ...]]:
    values = {value.name: value for each in graph.graphs for value in each.values}
    return [value.shape for value in values.values() if value.kind == "border" and value.dtype == "bool"]


def test_a_causal_mask_is_made_only_for_batches_that_need_one() -> None:
    model = models.build("llama")
    batch = models.batch("llama")
    full = torch.ones_like(batch["input_ids"])
    padded = full.clone()
    padded[1, 20:] = 0
    positions = torch.arange(hf_jobs.SEQ).expand(2, -1)
    assert masks(capture(model, (), batch)) == []
    assert masks(capture(model, (), {**batch, "attention_mask": full})) == []
    for more in ({"attention_mask": padded}, {"position_ids": positions}):
        graph = capture(model, (), {**batch, **more})
        assert masks(graph) == [(2, 1, hf_jobs.SEQ, hf_jobs.SEQ)]
        model.zero_grad()
        assert_runs_like(model, {**batch, **more}, graph)


def test_a_sliding_window_keeps_its_mask() -> None:
    settings = {**hf_jobs.LLAMA, "vocab_size": hf_jobs.VOCAB, "sliding_window": 8}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**settings))
    batch = models.batch("llama")
    graph = capture(model, (), batch)
    assert masks(graph) == [(2, 1, hf_jobs.SEQ, hf_jobs.SEQ)]
    assert_runs_like(model, batch, graph)


def test_what_is_patched_and_set_comes_back() -> None:
    from transformers import masking_utils

    before = (masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], masking_utils.find_packed_sequence_indices)
    model = models.build("gpt2")
    assert model.config.use_cache
    capture(model, (), models.batch("gpt2"))
    with pytest.raises(CaptureError):
        capture(model, (), {"input_ids": models.batch("gpt2")["input_ids"]})
    assert model.config.use_cache
    assert (masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], masking_utils.find_packed_sequence_indices) == before


def test_an_encoder_and_a_decoder() -> None:
    """Values that many layers read, and a table of positions that only the first of each stack owns."""
    settings = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=hf_jobs.VOCAB, decoder_start_token_id=0, **settings)
    torch.manual_seed(0)
    model, batch = transformers.T5ForConditionalGeneration(config), models.batch("llama")
    graph = capture(model, (), batch)
    assert counts(graph)[:2] == (9, 7)
    assert_runs_like(model, batch, graph)


@pytest.mark.parametrize(
    ("family", "settings", "change", "message"),
    [
        (
            "gpt2", {}, lambda model: model.gradient_checkpointing_enable(),
            r"transformer\.h\.0, transformers/modeling_layers\.py:\d+: activation checkpointing is on .* "
            r"model\.gradient_checkpointing_disable\(\)",
        ),
        (
            "mixtral", {"experts_implementation": "eager"}, lambda model: None,
            r"model\.layers\.0\.mlp\.experts, mixtral/modeling_mixtral\.py:\d+: the forward depends on the values of tensors.*"
            r"experts_implementation='batched_mm'.*run Engine without a plan",
        ),
        (
            "mixtral", {"experts_implementation": "grouped_mm"}, lambda model: None,
            r"model\.layers\.0, mixtral/modeling_mixtral\.py:\d+ and behind: the layer's backward cannot be traced.*"
            r"experts_implementation='batched_mm'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_captured_is_refused_by_name(family: str, settings: dict[str, Any], change: Any, message: str) -> None:
    model = models.build(family, **settings).train()
    change(model)
    with pytest.raises(CaptureError, match=message):
        capture(model, (), models.batch(family))


def test_without_labels_there_is_no_loss() -> None:
    with pytest.raises(
        CaptureError, match=r"GPT2LMHeadModel must return a scalar loss .* but gave no loss: are the labels in the"
    ):
        capture(models.build("gpt2"), (), {"input_ids": models.batch("gpt2")["input_ids"]})


@pytest.mark.full
def test_seventy_billion_parameters_on_meta() -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=80, vocab_size=128256, **sizes))
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    graph = capture(model, (), {"input_ids": tokens, "labels": tokens})
    assert counts(graph)[:2] == (82, 3)
    assert sum(torch.Size(parameter.shape).numel() for parameter in graph.parameters if not parameter.buffer) > 70e9
