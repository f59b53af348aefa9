"""A transformer block as one would write it by hand for a rank of Megatron's tensor parallelism, and a communicator for one rank
alone.

Query, key, value and the first matrix of the MLP are split by columns, the two others by rows; a rank has its share of the heads.
The reductions behind the row-parallel matrices are left out here, and do nothing in the lowered block: what is compared is all
that a rank does between them.
"""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp.layout import Mesh
from scrimp.lower import Arrived
from scrimp.move import Program


class LocalAttention(nn.Module):
    def __init__(self, dim: int, heads: int, ranks: int) -> None:
        super().__init__()
        self.heads, self.width = heads // ranks, dim // heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim // ranks), nn.Linear(dim // ranks, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, self.width).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return y


class LocalMLP(nn.Module):
    def __init__(self, dim: int, ranks: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim // ranks), nn.Linear(4 * dim // ranks, dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class LocalBlock(nn.Module):
    """Its parameters have the names and shapes of the lowered block's."""

    def __init__(self, dim: int, heads: int, ranks: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.mlp = LocalAttention(dim, heads, ranks), LocalMLP(dim, ranks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class Silent:
    """Rank 0 without the others: a sum over the ranks returns its input, any other move zeros."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.rank = mesh, 0

    def move(self, program: Program, local: Tensor, *, donate: bool) -> Tensor:
        if program.src.dims == program.dst.dims:
            return local
        return local.new_zeros(program.dst.local_shape(program.shape, self.mesh, self.rank))

    def start(self, program: Program, local: Tensor, *, donate: bool) -> Arrived:
        return Arrived(self.move(program, local, donate=donate))

    def all_reduce(self, tensor: Tensor, how: str, axes: tuple[str, ...]) -> Tensor:
        return tensor.clone()
