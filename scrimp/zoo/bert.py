"""BERT: an encoder with LayerNorm after each half of a block, trained to restore masked tokens; its decoder is tied."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp.zoo.configs import BertConfig
from scrimp.zoo.gpt import MLP, Embedding

IGNORE = -100  # the target of a token that is not masked


class Attention(nn.Module):
    """Self-attention over the whole row, with a matrix each for query, key and value."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.q = nn.Linear(config.dim, config.dim)
        self.k = nn.Linear(config.dim, config.dim)
        self.v = nn.Linear(config.dim, config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = (part(x).view(batch, seq, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return y


class Block(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.norm1 = nn.LayerNorm(config.dim)
        self.mlp = MLP(config.dim, config.expansion * config.dim)
        self.norm2 = nn.LayerNorm(config.dim)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.drop(self.attention(x)))
        x = self.norm2(x + self.drop(self.mlp(x)))
        return x


class Bert(nn.Module):
    """`forward(tokens)` gives logits, `forward(tokens, targets)` the mean cross-entropy over targets other than IGNORE."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.dim)
        self.positions = Embedding(config.seq, config.dim)
        self.segments = Embedding(config.segments, config.dim)
        self.norm = nn.LayerNorm(config.dim)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.transform = nn.Linear(config.dim, config.dim)
        self.transform_norm = nn.LayerNorm(config.dim)
        self.decoder = nn.Linear(config.dim, config.vocab)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ties embedding and decoder anew, for the reasons given in gpt.py; the decoder keeps a bias of its own."""
        self.embed.weight = self.decoder.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        seq = tokens.shape[1]
        if seq > self.config.seq:
            raise ValueError(f"{seq} tokens in a row, but the model has positions for {self.config.seq}")
        if segments is None:
            segments = torch.zeros_like(tokens)
        x = self.embed(tokens) + self.positions(torch.arange(seq, device=tokens.device)) + self.segments(segments)
        x = self.drop(self.norm(x))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.decoder(self.transform_norm(F.gelu(self.transform(x))))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)
