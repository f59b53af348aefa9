"""A GPT with mixture-of-experts MLPs: a router sends each token to its best experts, and an auxiliary loss balances the load.

No token is dropped, whatever the router chooses, and shapes never depend on the data. A row of the batch is a group of tokens.
The experts form `expert_parallel` blocks of equal size. In every group a block has rows for all pairs of a token and an expert
that it could get:

    rows of a block = tokens of a group x min(chosen, experts of a block)

One block has exactly the rows of all pairs, without padding. Several blocks may be split over devices by a plan. The dispatched
rows [groups, blocks, rows, dim] then travel from a split of groups to a split of blocks and back: two all-to-alls. A device has
room for the case that all tokens choose its experts. That is the price of static shapes without dropped tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp.zoo.configs import MoEConfig
from scrimp.zoo.gpt import CausalAttention, Embedding
from scrimp.zoo.ragged import ragged_linear


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

    def forward(self, x: Tensor, ends: Tensor, filled: int) -> Tensor:
        """x: groups, blocks, rows, dim. ends: groups, blocks, experts of a block."""
        shape = ends.shape[1:]
        up, up_bias = self.up.view(*shape, *self.up.shape[1:]), self.up_bias.view(*shape, -1)
        down, down_bias = self.down.view(*shape, *self.down.shape[1:]), self.down_bias.view(*shape, -1)
        hidden = F.gelu(ragged_linear(x, ends, up, up_bias, filled))
        made: Tensor = ragged_linear(hidden, ends, down, down_bias, filled)
        return made


class Mixture(nn.Module):
    """Returns the mixed output and the auxiliary loss: 1 when all experts have the same load, more otherwise."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.chosen, self.blocks = config.chosen, config.expert_parallel
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = Experts(config.experts, config.dim, config.expansion * config.dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        groups, tokens, dim = x.shape
        scores = self.router(x)
        best, which = scores.topk(self.chosen, -1)
        pairs, experts = which.flatten(1), scores.shape[-1]
        counts = pairs.new_zeros(groups, experts).scatter_add(1, pairs, torch.ones_like(pairs))
        ends = counts.view(groups, self.blocks, -1).cumsum(-1)
        sources, slots = self._places(pairs, ends)
        sent = x.gather(1, sources[:, :, None].expand(-1, -1, dim)).view(groups, self.blocks, -1, dim)
        made = self.experts(sent, ends, tokens * self.chosen).flatten(1, 2)
        back = made.gather(1, slots[:, :, None].expand(-1, -1, dim)).view(groups, tokens, self.chosen, dim)
        mixed = torch.einsum("gtk,gtkd->gtd", best.softmax(-1), back)
        # An expert's share of tokens has no gradient; its share of probability has.
        share, odds = counts.sum(0) / which.numel(), scores.softmax(-1).mean((0, 1))
        return mixed, (share * odds).sum() * experts

    def _places(self, pairs: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """The token of each row [groups, blocks * rows] and the row of each pair [groups, pairs]. Padding has some token of the
        group."""
        count, size = pairs.shape[1], ends.shape[-1]
        rows = count // self.chosen * min(self.chosen, size)
        starts = ends[..., -1].cumsum(-1) - ends[..., -1]
        order = pairs.sort(dim=1, stable=True).indices
        taken = (starts[..., None] + torch.arange(rows, device=pairs.device)).clamp(max=count - 1).flatten(1)
        block = pairs // size
        slots = order.argsort(1) - starts.gather(1, block) + block * rows
        return order.gather(1, taken) // self.chosen, slots


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
