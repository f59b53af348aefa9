"""Momentum SGD with the memory layout of Deep Gradient Compression (Lin et al., ICLR 2018), for one worker.

Re-created from what the reference code keeps, to be measured beside others; it trains as the paper says. For every matrix
there are momentum u and residual v in fp32, and a gradient that is made once, never freed, and takes the densified result.
In backward, as soon as a gradient is there: u = m*u + g, v = v + u; a magnitude copy of the whole of v, a mask of the whole,
the entries over a threshold that is estimated from a sample; those are sent, and u and v are zeroed there. Vectors go whole.

Left out: the loop that lowers a threshold under which too few entries lie (some fewer are sent then), local clipping and the
warm-up of the density, which take no memory. With one worker, what is gathered is a copy of what was sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

SAMPLED_FROM = 10_000  # elements: what is smaller is its own sample


@dataclass(kw_only=True)
class Kept:
    """Of one parameter. `master` is the parameter itself where that is fp32; `v` is None where all is sent."""

    master: Tensor
    u: Tensor
    v: Tensor | None
    arrived: tuple[Tensor, Tensor] | None = None


class Dgc:
    """Takes the parameters as they are, or in `dtype` with fp32 masters, but for those of batch norms, as is the custom.
    `step` after every backward; gradients are its own."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        momentum: float = 0.9,
        density: float = 0.01,
        sample: float = 0.01,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.lr, self.momentum, self.density, self.sample = lr, momentum, density, sample
        self._kept: dict[Tensor, Kept] = {}
        wide = {weight for part in model.modules() if isinstance(part, _BatchNorm) for weight in part.parameters(recurse=False)}
        for weight in model.parameters():
            master = weight.detach()
            if weight not in wide:
                weight.data = weight.data.to(dtype)
            weight.grad = torch.zeros_like(weight)
            zeros = torch.zeros(weight.numel(), device=weight.device)
            self._kept[weight] = Kept(master=master, u=zeros, v=zeros.clone() if weight.dim() > 1 else None)
            weight.register_post_accumulate_grad_hook(_landing(weakref.ref(self)))

    @torch.no_grad()
    def step(self) -> None:
        for weight, kept in self._kept.items():
            assert weight.grad is not None
            if kept.arrived is not None:
                positions, values = kept.arrived
                kept.arrived = None
                weight.grad.zero_().view(-1).index_add_(0, positions, values.to(weight.dtype))
            kept.master.add_(weight.grad, alpha=-self.lr)
            if weight.dtype != kept.master.dtype:
                weight.copy_(kept.master)
            weight.grad.zero_()

    @torch.no_grad()
    def _land(self, weight: Tensor) -> None:
        kept = self._kept[weight]
        assert weight.grad is not None
        gradient = weight.grad.view(-1)
        kept.u.mul_(self.momentum).add_(gradient)
        if kept.v is None:
            gradient.copy_(kept.u.clone())  # which would be summed over all workers
            return
        kept.v.add_(kept.u)
        positions = largest(kept.v, density=self.density, sample=self.sample)
        values = kept.v[positions]
        kept.v.index_fill_(0, positions, 0)
        kept.u.index_fill_(0, positions, 0)
        kept.arrived = (positions.clone(), values.clone())


def _landing(dgc: weakref.ref[Dgc]) -> Callable[[Tensor], None]:
    """A hook is out of the garbage collector's sight: one that held the optimizer would hold it for ever."""

    def land(weight: Tensor) -> None:
        alive = dgc()
        assert alive is not None
        alive._land(weight)

    return land


def largest(values: Tensor, *, density: float, sample: float) -> Tensor:
    """Positions of about a `density` of the entries, never more: those whose magnitude is at least that of the same share of
    the sample. Exact where the sample is the whole."""
    wanted = ceil(density * values.numel())
    magnitudes = values.abs()
    sampled = magnitudes if values.numel() < SAMPLED_FROM else magnitudes[:: max(1, round(1 / sample))]
    threshold = sampled.topk(ceil(density * sampled.numel()), sorted=False).values.min()
    mask = magnitudes >= threshold
    positions = mask.nonzero().view(-1)
    if positions.numel() > wanted:
        positions = positions[magnitudes[positions].topk(wanted, sorted=False).indices]
    return positions
