"""The models that run under plans, by one name each: the zoo's tiny ones, five of them at hidden size 256, and Hugging Face's.
Those of eight layers run under plans with pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scrimp import zoo
from tests.support import capture_models

ROWS = 8
WIDE = {"dim": 256, "layers": 2}
EIGHT: dict[str, dict[str, Any]] = {"8": {"layers": 8}, "8-256": {"layers": 8, "dim": 256}}
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in zoo.names() if "tiny" in name},
    **{name.replace("tiny", "256"): (name, WIDE) for name in ("gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "moe-tiny")},
}
DEEP = {f"{each}-{size}": (f"{each}-tiny", settings) for each in ("gpt", "llama", "moe") for size, settings in EIGHT.items()}
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
    "hf-t5-8": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0},
    "hf-t5-8-256": {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0},
    "hf-qwen2": {**HEADS, "num_hidden_layers": 2, "num_key_value_heads": 8, "max_position_embeddings": 64},
}
STAGED = (*DEEP, *(name for name in HF if name.startswith("hf-t5-8")))  # T5 has as many layers in its decoder
MODELS = (*ZOO, *(name for name in HF if name not in STAGED))
WORDS, TOKENS = 64, 16


def is_wide(name: str) -> bool:
    """Whether its hidden size is 256."""
    return name.endswith("-256")


def build(name: str) -> nn.Module:
    """With the same weights every time."""
    torch.manual_seed(0)
    if name in ZOO or name in DEEP:
        preset, settings = {**ZOO, **DEEP}[name]
        return zoo.build(preset, **settings)
    import transformers

    match name:
        case "hf-t5" | "hf-t5-8" | "hf-t5-8-256":
            config = transformers.T5Config(vocab_size=WORDS, decoder_start_token_id=0, **HF[name])
            model: nn.Module = transformers.T5ForConditionalGeneration(config)
        case "hf-qwen2":
            model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(vocab_size=WORDS, **HF[name]))
        case _:
            model = capture_models.build(name.split("-")[1], **HF[name])
    return model.train()


def batch(name: str, step: int = 0) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Positional arguments and keywords of a step. A part of Hugging Face's labels is left out."""
    if name in ZOO or name in DEEP:
        preset, settings = {**ZOO, **DEEP}[name]
        return zoo.example_batch(preset, ROWS, step=step, **settings), {}
    draw = torch.Generator().manual_seed(step)
    if name in ("hf-vit", "hf-resnet"):
        images = torch.randn(ROWS, 3, 16, 16, generator=draw)
        return (), {"pixel_values": images, "labels": torch.randint(0, 10, (ROWS,), generator=draw)}
    tokens = torch.randint(0, WORDS, (ROWS, TOKENS), generator=draw)
    labels = tokens.clone()
    labels[step % ROWS, :7] = -100
    return (), {"input_ids": tokens, "labels": labels}


def backward(model: nn.Module, name: str, step: int, micro_batches: int) -> float:
    """The mean loss of the micro-batches of a step, and its gradients. That is the loss of the whole batch for most models, but
    not where a mixture of experts balances the load of a micro-batch, or where micro-batches have different numbers of labels."""
    args, kwargs = batch(name, step)
    total = 0.0
    for k in range(micro_batches):
        rows = slice(k * ROWS // micro_batches, (k + 1) * ROWS // micro_batches)
        found = model(*(each[rows] for each in args), **{key: each[rows] for key, each in kwargs.items()})
        loss = (found if isinstance(found, torch.Tensor) else found["loss"]) / micro_batches
        loss.backward()
        total += float(loss.detach())
    return total
