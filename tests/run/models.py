"""The models that run under plans, by one name each: the zoo's tiny ones, five of them at hidden size 256, and Hugging Face's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scrimp import zoo
from tests.support import capture_models

ROWS = 8
WIDE = {"dim": 256, "layers": 2}
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in zoo.names() if "tiny" in name},
    **{name.replace("tiny", "256"): (name, WIDE) for name in ("gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "moe-tiny")},
}
# Of Hugging Face, with sizes that divide over 8 ranks.
HEADS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
HF: dict[str, dict[str, Any]] = {
    "hf-gpt2": {"n_embd": 64, "n_head": 8},
    "hf-gpt2-eager": {"n_embd": 64, "n_head": 8, "attn_implementation": "eager"},  # attention in several operators
    "hf-llama": {**HEADS, "num_key_value_heads": 8},
    "hf-bert": HEADS,
    "hf-vit": HEADS,
    "hf-resnet": {"embedding_size": 16, "hidden_sizes": [16, 32]},
    "hf-mixtral": {**HEADS, "num_key_value_heads": 8},
    "hf-t5": {"d_model": 64, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 8, "dropout_rate": 0.0},
    "hf-qwen2": {**HEADS, "num_hidden_layers": 2, "num_key_value_heads": 8, "max_position_embeddings": 64},
}
MODELS = (*ZOO, *HF)
WORDS, TOKENS = 64, 16


def is_wide(name: str) -> bool:
    """Whether its hidden size is 256."""
    return name.endswith("-256")


def build(name: str) -> nn.Module:
    """With the same weights every time."""
    torch.manual_seed(0)
    if name in ZOO:
        preset, settings = ZOO[name]
        return zoo.build(preset, **settings)
    import transformers

    match name:
        case "hf-t5":
            config = transformers.T5Config(vocab_size=WORDS, decoder_start_token_id=0, **HF[name])
            model: nn.Module = transformers.T5ForConditionalGeneration(config)
        case "hf-qwen2":
            model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(vocab_size=WORDS, **HF[name]))
        case _:
            model = capture_models.build(name.split("-")[1], **HF[name])
    return model.train()


def batch(name: str, step: int = 0) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Positional arguments and keywords of a step. A part of Hugging Face's labels is left out."""
    if name in ZOO:
        preset, settings = ZOO[name]
        return zoo.example_batch(preset, ROWS, step=step, **settings), {}
    draw = torch.Generator().manual_seed(step)
    if name in ("hf-vit", "hf-resnet"):
        images = torch.randn(ROWS, 3, 16, 16, generator=draw)
        return (), {"pixel_values": images, "labels": torch.randint(0, 10, (ROWS,), generator=draw)}
    tokens = torch.randint(0, WORDS, (ROWS, TOKENS), generator=draw)
    labels = tokens.clone()
    labels[step % ROWS, :7] = -100
    return (), {"input_ids": tokens, "labels": labels}


def loss_of(model: nn.Module, name: str, step: int) -> torch.Tensor:
    args, kwargs = batch(name, step)
    found = model(*args, **kwargs)
    return found if isinstance(found, torch.Tensor) else found["loss"]
