"""GPT: a decoder with LayerNorm before each half of a block, learned positions and, by default, a tied head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp.zoo.configs import EAGER, FUSED, GPTConfig

if TYPE_CHECKING:
    from scrimp.zoo.configs import HeadLoss


class Embedding(nn.Embedding):
    """Initialised small: torch's embeddings of variance 1 would drown the blocks' additions to the residual stream."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Head(nn.Linear):
    """With targets it returns the loss instead of logits: a custom loss may use the weight only here, where it is on the
    device."""

    def __init__(self, dim: int, vocab: int, loss: HeadLoss | None) -> None:
        super().__init__(dim, vocab, bias=False)
        self.loss = loss

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return super().forward(x)
        assert self.loss is not None
        return self.loss(x, self.weight, targets)


class CausalAttention(nn.Module):
    """Self-attention over the past, with query, key and value in one matrix."""

    def __init__(self, dim: int, heads: int, dropout: float, attention: str = FUSED) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention = attention
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.attention == EAGER:
            mixed = self._eager(q, k, v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        return y

    def _eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Saves for the backward: q, k, v, the probabilities, the dropout mask, and the probabilities after dropout. Scaling q
        and adding the causal mask save nothing."""
        place = torch.arange(q.shape[-2], device=q.device)
        hidden = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(place > place[:, None], -torch.inf)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + hidden
        return F.dropout(scores.softmax(-1), self.dropout, self.training) @ v


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = CausalAttention(config.dim, config.heads, config.dropout, config.attention)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = MLP(config.dim, config.expansion * config.dim)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        x = x + self.drop(self.mlp(self.norm2(x)))
        return x


class GPT(nn.Module):
    """`forward(tokens)` gives logits, `forward(tokens, targets)` the mean cross-entropy in nats per token."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.dim)
        self.positions = Embedding(config.seq, config.dim)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = Head(config.dim, config.vocab, config.head_loss)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The root has no parameter of its own, but `to_empty` gives each use of a tied one a tensor of its own: this ties them
        again.

        The embedding takes the head's parameter, not the other way round, because the head is initialised last: so a model built
        on `meta` and then reset module by module has the weights of one that was built at once.
        """
        if self.config.tie:
            self.embed.weight = self.head.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        seq = tokens.shape[1]
        if seq > self.config.seq:
            raise ValueError(f"{seq} tokens in a row, but the model has positions for {self.config.seq}")
        x = self.drop(self.embed(tokens) + self.positions(torch.arange(seq, device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is not None and self.config.head_loss is not None:
            loss: Tensor = self.head(x, targets)
            return loss
        logits: Tensor = self.head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
