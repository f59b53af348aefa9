"""Tiny Hugging Face models of six families, with batches, at any depth. They import transformers when called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.rank_jobs import hf as hf_jobs

FAMILIES = ["gpt2", "llama", "bert", "vit", "resnet", "mixtral"]
VIT = {"image_size": 16, "patch_size": 4, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
MIXTRAL = {**hf_jobs.LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": hf_jobs.VOCAB}


def build(family: str, layers: int = 2, **overrides: Any) -> nn.Module:
    import transformers

    if family in hf_jobs.MODELS:
        depth = {"n_layer": layers} if family == "gpt2" else {"num_hidden_layers": layers}
        return hf_jobs.build(family, **depth, **overrides)
    if family == "vit":
        config = transformers.ViTConfig(**{**hf_jobs.SIZES, **VIT, "num_hidden_layers": layers, "num_labels": 10, **overrides})
        return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]
    if family == "resnet":
        sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [layers, layers], "layer_type": "basic"}
        return transformers.ResNetForImageClassification(transformers.ResNetConfig(**{**sizes, "num_labels": 10, **overrides}))  # type: ignore[no-any-return]
    settings = {**MIXTRAL, "num_hidden_layers": layers, "experts_implementation": "batched_mm", **overrides}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings))  # type: ignore[no-any-return]


def batch(family: str, rows: int = 2) -> dict[str, Tensor]:
    """With labels that are not all asked for."""
    torch.manual_seed(1)
    if family in ("vit", "resnet"):
        return {"pixel_values": torch.randn(rows, 3, 16, 16), "labels": torch.randint(0, 10, (rows,))}
    tokens = torch.randint(0, hf_jobs.VOCAB, (rows, hf_jobs.SEQ))
    labels = tokens.clone()
    labels[0, :7] = -100
    return {"input_ids": tokens, "labels": labels}
