"""How far a step of SGD under a plan may be from the same step of one process.

Training amplifies rounding, by factors that nobody knows. So each step of the reference begins with the weights that the engine
really has, and only the moments are carried on, with the bound on their error.

A gradient is a long chain of sums, in another order on each mesh. Its error is bounded as everywhere in these tests: 1e-5 of its
norm, or of a tenth of the largest norm of any gradient (`tests/support/lowering/run.py` says why). The moment and the update add
their roundings, which are counted (`tests/support/bounds.py`). All bounds are of norms: a bound of each element is one of the
norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from scrimp import SGD
from tests.run import models
from tests.support.bounds import MOMENT, UPDATE, gamma

GRADIENT, FLOOR = 1e-5, 0.1


@dataclass
class Moment:
    """SGD's moment of one tensor in fp64, the norm of its magnitudes, and the norm of the error that fp32 may have."""

    moment: torch.Tensor
    size: float = 0.0
    off: float = 0.0

    def add(self, momentum: float, gradient: torch.Tensor, error: float) -> None:
        self.moment = momentum * self.moment + gradient
        self.size = momentum * self.size + float(gradient.norm()) + error
        self.off = momentum * self.off + error + gamma(MOMENT) * self.size


class Beside:
    """`wrong`: the largest error of each tensor so far, as a multiple of its bound; at most 1 where the arithmetic is right."""

    def __init__(self, model: nn.Module, optimizer: SGD, micro_batches: int) -> None:
        assert not optimizer.weight_decay
        assert isinstance(optimizer.lr, float)
        self.model, self.lr, self.momentum, self.micro_batches = model, optimizer.lr, optimizer.momentum, micro_batches
        self.before = {key: value.clone() for key, value in model.state_dict().items()}
        self.moments: dict[str, Moment] = {}
        self.wrong: dict[str, float] = {}

    def check(self, name: str, step: int, loss: float, after: dict[str, torch.Tensor]) -> None:
        """A step of the engine from the weights of before, whose loss was `loss`, to those of `after`."""
        self.model.load_state_dict(self.before, strict=False)  # a tied weight has one of its names
        self.model.zero_grad()
        wanted = models.backward(self.model, name, step, self.micro_batches)
        self._saw("loss", abs(loss - wanted), GRADIENT * abs(wanted))
        gradients = {key: each.grad.double() for key, each in self.model.named_parameters() if each.grad is not None}
        floor = FLOOR * max(float(each.norm()) for each in gradients.values())
        for key, gradient in gradients.items():
            mine = self.moments.setdefault(key, Moment(torch.zeros_like(gradient)))
            mine.add(self.momentum, gradient, GRADIENT * max(float(gradient.norm()), floor))
            old = self.before[key].double()
            bound = self.lr * (mine.off + gamma(UPDATE) * mine.size) + gamma(3) * float(old.norm())
            self._saw(key, float((after[key].double() - (old - self.lr * mine.moment)).norm()), bound)
        self._check_buffers(after)
        self.before = after

    def _check_buffers(self, after: dict[str, torch.Tensor]) -> None:
        """Running statistics: a mean is near zero, its error is relative to the spread."""
        buffers = dict(self.model.named_buffers())
        for key, wanted in buffers.items():
            if key not in after or not wanted.is_floating_point():
                continue
            spread = buffers.get(key.replace("running_mean", "running_var"), wanted * wanted).double().sqrt()
            self._saw(key, float((after[key].double() - wanted.double()).norm()), GRADIENT * float(spread.norm()))

    def _saw(self, key: str, error: float, bound: float) -> None:
        times = 0.0 if error == 0 else error / max(bound, 1e-300)
        self.wrong[key] = max(self.wrong.get(key, 0.0), times if times == times else float("inf"))
