"""Llama: a decoder with RMSNorm, rotary positions, grouped key and value heads, a gated MLP, no biases and an untied head."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp.zoo.configs import LlamaConfig
from scrimp.zoo.gpt import Embedding, Head


class Rotary(nn.Module):
    """The rotation angles of pairs of a head's entries, as tables that are computed, never stored or trained."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq: int, width: int, theta: float) -> None:
        super().__init__()
        self.theta = theta
        self.register_buffer("cos", torch.empty(seq, width), persistent=False)
        self.register_buffer("sin", torch.empty(seq, width), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        seq, width = self.cos.shape
        device = self.cos.device
        slow = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
        angle = torch.arange(seq, device=device, dtype=torch.float32).outer(self.theta**-slow)
        self.cos.copy_(angle.cos().repeat(1, 2))
        self.sin.copy_(angle.sin().repeat(1, 2))

    def forward(self, seq: int) -> tuple[Tensor, Tensor]:
        return self.cos[:seq], self.sin[:seq]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + half) of the last dim of x: batch, heads, seq, width."""
    first, second = x.chunk(2, -1)
    rotated: Tensor = x * cos + torch.cat((-second, first), -1) * sin
    return rotated.to(x.dtype)  # the tables are fp32; the result keeps x's dtype


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = config.heads, config.kv_heads, config.dim // config.heads
        self.q = nn.Linear(config.dim, config.heads * self.width, bias=False)
        self.k = nn.Linear(config.dim, config.kv_heads * self.width, bias=False)
        self.v = nn.Linear(config.dim, config.kv_heads * self.width, bias=False)
        self.out = nn.Linear(config.heads * self.width, config.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = rotate(self.q(x).view(batch, seq, self.heads, self.width).transpose(1, 2), cos, sin)
        k = rotate(self.k(x).view(batch, seq, self.kv_heads, self.width).transpose(1, 2), cos, sin)
        v = self.v(x).view(batch, seq, self.kv_heads, self.width).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, self._repeat(k), self._repeat(v), is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, self.heads * self.width))
        return y

    def _repeat(self, x: Tensor) -> Tensor:
        # By hand, because not every fused kernel takes fewer key heads than query heads.
        batch, _, seq, width = x.shape
        each = self.heads // self.kv_heads
        return x[:, :, None].expand(batch, self.kv_heads, each, seq, width).reshape(batch, self.heads, seq, width)


class GatedMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.dim, eps=config.eps)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.dim, eps=config.eps)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        x = x + self.mlp(self.norm2(x))
        return x


class Llama(nn.Module):
    """`forward(tokens)` gives logits, `forward(tokens, targets)` the mean cross-entropy in nats per token."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.dim)
        self.rotary = Rotary(config.seq, config.dim // config.heads, config.theta)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.eps)
        self.head = Head(config.dim, config.vocab, config.head_loss)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        seq = tokens.shape[1]
        if seq > self.config.seq:
            raise ValueError(f"{seq} tokens in a row, but the model has positions for {self.config.seq}")
        x = self.embed(tokens)
        cos, sin = self.rotary(seq)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        if targets is not None and self.config.head_loss is not None:
            loss: Tensor = self.head(x, targets)
            return loss
        logits: Tensor = self.head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
