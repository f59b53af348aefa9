"""A GPT with mixture-of-experts MLPs: a router sends each token to its best two experts, and an auxiliary loss balances the load.

Every expert runs on every token, and unselected ones count with weight 0. That costs experts / 2 times the arithmetic of sparse
dispatch, but shapes never depend on the data, no token is dropped (so the model stays causal) and no sum depends on the order in
which tokens arrive.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp.zoo.configs import MoEConfig
from scrimp.zoo.gpt import CausalAttention, Embedding


class Experts(nn.Module):
    """All experts of a layer as batched matrices."""

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, dim, hidden))
        self.up_bias = nn.Parameter(torch.empty(experts, 1, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down_bias = nn.Parameter(torch.empty(experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # nn.Linear's initialisation for each expert's matrix; on the stack it would take the batch of experts for an input dim.
        for weight, bias in ((self.up, self.up_bias), (self.down, self.down_bias)):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)
            nn.init.uniform_(bias, -bound, bound)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """x: tokens, dim. gates: tokens, experts."""
        hidden = F.gelu(torch.matmul(x, self.up) + self.up_bias) * gates.t()[:, :, None]
        return torch.einsum("eth,ehd->td", hidden, self.down) + gates @ self.down_bias


class Mixture(nn.Module):
    """Returns the mixed output and the auxiliary loss: 1 when all experts have the same load, more otherwise."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.chosen = config.chosen
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = Experts(config.experts, config.dim, config.expansion * config.dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        scores = self.router(flat)
        best, which = scores.topk(self.chosen, -1)
        choice = F.one_hot(which, scores.shape[-1]).to(scores.dtype)
        gates = torch.einsum("tk,tke->te", best.softmax(-1), choice)
        # An expert's share of tokens has no gradient; its share of probability has.
        share, odds = choice.mean((0, 1)), scores.softmax(-1).mean(0)
        balance = (share * odds).sum() * scores.shape[-1]
        return self.experts(flat, gates).view_as(x), balance


class Block(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = CausalAttention(config.dim, config.heads, config.dropout)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mixture = Mixture(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.drop(self.attention(self.norm1(x)))
        mixed, balance = self.mixture(self.norm2(x))
        return x + self.drop(mixed), balance


class MoE(nn.Module):
    """`forward(tokens)` gives logits, `forward(tokens, targets)` the mean cross-entropy plus the weighted extra loss."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.dim)
        self.positions = Embedding(config.seq, config.dim)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        seq = tokens.shape[1]
        if seq > self.config.seq:
            raise ValueError(f"{seq} tokens in a row, but the model has positions for {self.config.seq}")
        x = self.drop(self.embed(tokens) + self.positions(torch.arange(seq, device=tokens.device)))
        balances = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return loss + self.config.balance * torch.stack(balances).mean()
