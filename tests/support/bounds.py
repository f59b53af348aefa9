"""How far fp32 arithmetic may be from the formulas: bounds that follow from the number of roundings.

One operation in fp32 is off by at most U of its exact result, so n of them in a row by at most gamma(n) of the sum of the
magnitudes that went in (Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1). Which order a kernel adds in, and
whether it fuses a product with a sum, makes fewer roundings or the same number: the bound holds on every processor.

Errors only stay that small for one step. Over many, training amplifies them, by factors that nobody knows: so tests begin every
step with the weights that the engine really has, and carry the moments, in fp64, together with the bound on their error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

U = 2.0**-24  # fp32: half a unit in the last of 24 places
U_BF16 = 2.0**-8

# Of a moment (decay, product, sum) and of an update (rate, quotient, root, bias corrections, sum), with the constants of the
# formulas, which are rounded to fp32 too.
MOMENT, UPDATE = 6, 12


def gamma(count: int, unit: float = U) -> float:
    return count * unit / (1 - count * unit)


def mean_error(count: int, magnitudes: torch.Tensor) -> torch.Tensor:
    """Of a mean of `count` numbers, summed in any order; `magnitudes` is the mean of theirs."""
    return gamma(count + 1) * magnitudes


@dataclass
class Momentum:
    """SGD's moment of one tensor, and how far one that fp32 has may be from it."""

    momentum: float = 0.9
    moment: torch.Tensor | float = 0.0
    size: torch.Tensor | float = 0.0  # as the moment, of magnitudes
    off: torch.Tensor | float = 0.0

    def add(self, gradient: torch.Tensor, error: torch.Tensor) -> None:
        self.moment = self.momentum * self.moment + gradient
        self.size = self.momentum * self.size + gradient.abs() + error
        self.off = self.momentum * self.off + error + gamma(MOMENT) * self.size

    def update(self, lr: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is taken from the weights, and its error."""
        return lr * torch.as_tensor(self.moment), lr * (self.off + gamma(UPDATE) * torch.as_tensor(self.size))


@dataclass
class Adam:
    """Adam's moments likewise. The root of a mean of squares is a norm of the gradients, so by the triangle inequality it is off
    by no more than that norm of their errors."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    moment: torch.Tensor | float = 0.0
    size: torch.Tensor | float = 0.0
    off: torch.Tensor | float = 0.0
    square: torch.Tensor | float = 0.0
    square_off: torch.Tensor | float = 0.0

    def add(self, gradient: torch.Tensor, error: torch.Tensor) -> None:
        first, second = self.betas
        self.moment = first * self.moment + (1 - first) * gradient
        # As m + (1 - beta) * (g - m), so the magnitudes of both count.
        self.size = first * self.size + (1 - first) * (gradient.abs() + error)
        self.off = first * self.off + (1 - first) * error + gamma(MOMENT) * (2 * torch.as_tensor(self.size) + gradient.abs())
        self.square = second * self.square + (1 - second) * gradient**2
        self.square_off = second * self.square_off + (1 - second) * error**2

    def update(self, lr: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (1 - beta**count for beta in self.betas)
        root = (torch.as_tensor(self.square) / second).sqrt()
        # Every step rounds the squares anew: `count` times MOMENT roundings, halved by the root.
        root_off = (torch.as_tensor(self.square_off) / second).sqrt() + gamma(count * MOMENT) * root
        below = root + self.eps
        update = torch.as_tensor(self.moment) / first / below
        off = torch.as_tensor(self.off) / first / below + update.abs() * root_off / (below - root_off).clamp(min=self.eps / 2)
        size = torch.as_tensor(self.size) / first / below
        return lr * update, lr * (off + gamma(UPDATE) * size)


def excess(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest error, as a multiple of its bound; at most 1 where the arithmetic is right."""
    error = (got.double() - want.double()).abs()
    return float(torch.where(error == 0, 0.0, error / bound.clamp(min=1e-300)).max()) if error.numel() else 0.0
