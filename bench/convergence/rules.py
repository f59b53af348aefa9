"""The update rules that `bench.convergence` compares: gradients of P workers in, what to subtract from their weights out.

Gradients are a matrix with a row for each worker, and in it all parameters one after the other. Sparse rules send the largest
entries of each parameter, by the selection and the rounding of the engine itself, and keep back the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from scrimp.chunks import BLOCK, Coder, coder_numel, state_fields
from scrimp.exchange import row_topk, select_topk, take

MOMENTUM = 0.9
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8


@dataclass(frozen=True, kw_only=True)
class Sending:
    """How entries travel: `density` of them, to which it sinks from `warm_density` over `warm_steps`. `masking`: a momentum
    whose entry was sent begins anew, so that it does not push on in a direction that is old by the time it is sent again."""

    density: float = 0.01
    warm_density: float = 0.25
    warm_steps: int = 0
    dtype: torch.dtype = torch.bfloat16
    residual: Literal["fp32", "bf16", "int8", "none"] = "fp32"
    masking: bool = True

    def density_at(self, step: int) -> float:
        if step >= self.warm_steps:
            return self.density
        return float(self.warm_density * (self.density / self.warm_density) ** (step / self.warm_steps))


class Rule(Protocol):
    def step(self, gradients: Tensor, lr: float) -> Tensor: ...


class DenseSGD:
    def __init__(self, numel: int) -> None:
        self.u = torch.zeros(numel)

    def step(self, gradients: Tensor, lr: float) -> Tensor:
        self.u.mul_(MOMENTUM).add_(gradients.mean(0))
        return self.u * lr


class DenseAdam:
    def __init__(self, shape: Sequence[int]) -> None:
        self.m, self.v, self.t = torch.zeros(*shape), torch.zeros(*shape), 0

    def step(self, gradients: Tensor, lr: float) -> Tensor:
        return self.direction(gradients.mean(0)).mul_(lr)

    def direction(self, gradients: Tensor) -> Tensor:
        self.t += 1
        self.m.lerp_(gradients, 1 - BETA_1)
        self.v.mul_(BETA_2).addcmul_(gradients, gradients, value=1 - BETA_2)
        root = self.v.sqrt().div_((1 - BETA_2**self.t) ** 0.5).add_(EPSILON)
        return torch.div(self.m, root, out=root).div_(1 - BETA_1**self.t)


class Exchange:
    """What waits, by worker, in the precision that it is kept in, and what is sent of it."""

    def __init__(self, workers: int, sizes: Sequence[int], sending: Sending) -> None:
        self.sizes, self.sending, self.shape, self.t = sizes, sending, (workers, sum(sizes)), 0
        self.kept = torch.zeros(self.shape, dtype=torch.bfloat16 if sending.residual == "bf16" else torch.float32)
        if sending.residual == "int8":
            numel = workers * sum(sizes)
            if any(size % BLOCK for size in sizes):
                raise ValueError(f"a block of {BLOCK} would reach from one parameter into the next: {sizes}")
            self.span = slice(0, numel)
            self.states = [torch.zeros(field.numel(numel), dtype=field.dtype) for field in state_fields(2, "int8")]
            self.coder = Coder(torch.zeros(coder_numel(numel)))

    def add_and_send(self, more: Tensor, momentum: Tensor, lr: float) -> Tensor:
        """The mean of what was sent of what waits, with `more` added; in `momentum` the entries that were sent are masked.

        What waits has its learning rate with it: what a step found counts as it would have counted then.
        """
        waiting = self._load().add_(more, alpha=lr)
        density, total = self.sending.density_at(self.t), torch.zeros(self.shape[1])
        for row, own in zip(waiting, momentum, strict=True):
            start = 0
            for size in self.sizes:
                here = slice(start, start + size)
                positions = select_topk(row[here], row_topk(size, density))
                total[here].index_add_(0, positions, take(row[here], positions, self.sending.dtype).float())
                if self.sending.masking:
                    own[here].index_fill_(0, positions, 0.0)
                start += size
        self.t += 1
        self._save(waiting)
        return total.div_(self.shape[0])

    def _load(self) -> Tensor:
        if self.sending.residual == "int8":
            first, _ = self.coder.decode(self.states, self.span)
            return first.view(self.shape)
        return torch.zeros(self.shape) if self.sending.residual == "none" else self.kept.float()

    def _save(self, waiting: Tensor) -> None:
        if self.sending.residual == "int8":
            self.coder.moments(self.span)[1].zero_()  # the codec is one of two moments: the second is not used here
            self.coder.encode(self.states, self.span, place=0, count=self.t)
        elif self.sending.residual != "none":
            self.kept.copy_(waiting)


class SparseSGD:
    """Momentum before the exchange: what waits is what would have been applied by now, not the bare gradients."""

    def __init__(self, workers: int, sizes: Sequence[int], sending: Sending) -> None:
        self.u = torch.zeros(workers, sum(sizes))
        self.exchange = Exchange(workers, sizes, sending)

    def step(self, gradients: Tensor, lr: float) -> Tensor:
        self.u.mul_(MOMENTUM).add_(gradients)
        return self.exchange.add_and_send(self.u, self.u, lr)


class SparseAdam:
    """Adam before the exchange, with moments of each worker's own: what waits is in units of the update, so that largest means
    what would move most, and weights agree though moments do not, as nothing but what was sent changes them."""

    def __init__(self, workers: int, sizes: Sequence[int], sending: Sending) -> None:
        self.adam = DenseAdam((workers, sum(sizes)))
        self.exchange = Exchange(workers, sizes, sending)

    def step(self, gradients: Tensor, lr: float) -> Tensor:
        return self.exchange.add_and_send(self.adam.direction(gradients), self.adam.m, lr)


class RawAdam:
    """Adam after the exchange of bare gradients, for comparison: moments of what arrives once in a hundred steps."""

    def __init__(self, workers: int, sizes: Sequence[int], sending: Sending) -> None:
        self.adam = DenseAdam((sum(sizes),))
        self.exchange = Exchange(workers, sizes, sending)

    def step(self, gradients: Tensor, lr: float) -> Tensor:
        return self.adam.direction(self.exchange.add_and_send(gradients, gradients, 1.0)).mul_(lr)


SPARSE: dict[str, Callable[[int, Sequence[int], Sending], Rule]] = {"SGD": SparseSGD, "AdamW": SparseAdam, "raw": RawAdam}


def dense_rule(family: str, numel: int) -> Rule:
    return DenseSGD(numel) if family == "SGD" else DenseAdam((numel,))
