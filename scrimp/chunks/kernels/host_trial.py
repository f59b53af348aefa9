"""The trial before the host's update kernel is used: a few updates must have the bits of torch's fused kernels.

Another build of torch may round in another order. The inputs here distinguish all forms (`kernels/host_forms.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from scrimp.chunks.kernels.host_update import Native

NUMELS = (24 * 16 + 15, *[15] * 16)  # vectors, and many last elements: of each 15, 3, 7 or 15 are the last
ROUNDS = ((1, 0.9), (7, 0.3), (2, 0.0))  # of each: updates so far, beta1

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """Masters, both moments and gradients before the updates, and torch's results, for each of ROUNDS."""

    before: list[list[Tensors]]
    after: list[list[Tensors]]

    def passed_by(self, kernel: Native) -> bool:
        for (count, beta1), before, after in zip(ROUNDS, self.before, self.after, strict=True):
            if any(
                not torch.equal(mine.view(torch.int32), other.view(torch.int32))
                for given, wanted in zip(zip(*before, strict=True), zip(*after, strict=True), strict=True)
                for mine, other in zip(updated(kernel, given, count, beta1), wanted, strict=True)
            ):
                return False
        return _rounds_as_torch(kernel)


def trial() -> Trial:
    random = torch.Generator().manual_seed(0)

    def draw() -> Tensors:
        return [torch.randn(numel, generator=random, dtype=torch.float32, device="cpu") for numel in NUMELS]

    before = [[draw(), draw(), [drawn.square_() for drawn in draw()], draw()] for _ in ROUNDS]
    for gradient in before[-1][3]:
        gradient[::3] = -0.0  # with beta1 = 0 the first moment is the gradient, and the form decides the sign of a 0
    after = [_by_torch(given, count, beta1) for given, (count, beta1) in zip(before, ROUNDS, strict=True)]
    return Trial(before, after)


def updated(kernel: Native, given: tuple[torch.Tensor, ...], count: int, beta1: float) -> Tensors:
    """The first moment after an update by AdamW; master and both moments after one by SGD, too."""
    p, m, v = (tensor.clone() for tensor in given[:3])
    g = given[3]
    kernel.adamw(p, m, v, g, None, None, lr=0.01, beta1=beta1, beta2=0.99, eps=1e-8, weight_decay=0.1, count=count, threads=1)
    between = m.clone()
    kernel.sgd(
        p, m, g, None, None,
        lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.1, nesterov=count == 1, count=2, threads=1,
    )  # fmt: skip
    return [between, p, m, v]


def _by_torch(given: list[Tensors], count: int, beta1: float) -> list[Tensors]:
    p, m, v = ([tensor.clone() for tensor in tensors] for tensors in given[:3])
    steps = [torch.tensor(float(count), dtype=torch.float32, device="cpu") for _ in p]
    torch._fused_adamw_(
        p, given[3], m, v, [], steps,
        lr=0.01, beta1=beta1, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    between = [tensor.clone() for tensor in m]
    torch._fused_sgd_(
        p, given[3], m,
        lr=0.01, momentum=0.9, dampening=0.1, weight_decay=0.1, nesterov=count == 1, maximize=False, is_first_step=False,
    )  # fmt: skip
    return [between, p, m, v]


def rounded(kernel: Native) -> tuple[torch.Tensor, torch.Tensor]:
    """Masters, many of them NaNs of different bits, and the weights in bf16 that the kernel makes of them."""
    nans = torch.tensor([0x7FC00000, 0x7FD23456, 0x7FFFFFFF, -0x400000, -1], dtype=torch.int32, device="cpu")
    masters = torch.cat([nans.view(torch.float32), torch.linspace(-3, 3, 7, dtype=torch.float32, device="cpu")]).repeat(4)[:47]
    weights = torch.empty(masters.numel(), dtype=torch.bfloat16, device="cpu")
    kernel.sgd(
        masters, None, torch.zeros_like(masters), weights, None,
        lr=0.0, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, count=1, threads=1,
    )  # fmt: skip
    return masters, weights


def _rounds_as_torch(kernel: Native) -> bool:
    masters, weights = rounded(kernel)
    return torch.equal(weights.view(torch.int16), masters.to(torch.bfloat16).view(torch.int16))
