"""Tiny Hugging Face models, and what ranks do with them in the tests. They import transformers when called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.rank_jobs.engine import beside_ddp
from tests.support.reference import Batch

VOCAB, SEQ = 64, 24


GPT2 = {"n_positions": SEQ, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 2}
BERT = {**SIZES, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "max_position_embeddings": SEQ}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2-base": ("GPT2Model", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama-base": ("LlamaModel", "LlamaConfig", LLAMA),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
}


def build(name: str, **overrides: Any) -> nn.Module:
    """Without dropout, which ranks would not draw as one process does."""
    import transformers

    model, config, settings = MODELS[name]
    common = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**{**common, **settings, **overrides}))
    return made


def batches(steps: int, batch: int = 4) -> list[Batch]:
    """Tokens that can be learnt: each is the one before plus a step of its row's own."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(steps):
        start, stride = torch.randint(0, VOCAB, (2, batch, 1), generator=draw)
        tokens = (start + stride % 5 * torch.arange(SEQ)) % VOCAB
        rows.append((tokens, tokens))
    return rows


class ByPosition(nn.Module):
    """For the plain loops, which know only positions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.model(input_ids=tokens, labels=labels)


class Loss(ByPosition):
    """What the model says of a batch, and nothing else."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return super().forward(tokens, labels).loss


def alongside(name: str, steps: int, activations: str) -> tuple[dict[str, torch.Tensor], int, int, int, dict[str, float]]:
    """With PyTorch's data parallel beside it, step by step, on this rank's share of global batches of 8."""
    settings = {"precision": "fp32", "activations": activations, "chunk_numel": 5000}
    return beside_ddp(lambda: Loss(build(name)), batches(steps, batch=8), "adamw", settings)
