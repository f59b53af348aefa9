"""Replaces calls while a forward is traced: those whose results seem to depend on data, but do not.

torch.rand([]) < 0              a number drawn from [0, 1) is not below 0, and is below 1: LayerDrop with a rate of 0 drops no
                                layer. Compared with any other number, or used otherwise, it is drawn as usual
torch.bincount(x, minlength=n)  has n counts, if all of x is below n, as in counts of classes and experts
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from scrimp.capture.torch_private.dynamo import learn_torch

_rand = torch.rand
_ONE = ((), (1,))


class Drawn:
    """One number of [0, 1), drawn only when its value matters beyond a comparison with 0 or 1."""

    def __init__(self, size: tuple[int, ...], options: dict[str, Any]) -> None:
        self.size, self.options = size, options

    def tensor(self) -> Tensor:
        return _rand(self.size, **self.options)

    def __lt__(self, other: Any) -> Any:
        return self._below(other, "lt")

    def __le__(self, other: Any) -> Any:
        return self._below(other, "le")

    def __gt__(self, other: Any) -> Any:
        return self._above(other, "gt")

    def __ge__(self, other: Any) -> Any:
        return self._above(other, "ge")

    def _below(self, other: Any, compare: str) -> Any:
        """It is exactly 0 once in 2^24 draws: as a rate, 0 means never."""
        if isinstance(other, (int, float)) and not 0 < other < 1:
            return other >= 1
        return getattr(self.tensor(), compare)(other)

    def _above(self, other: Any, compare: str) -> Any:
        if isinstance(other, (int, float)) and not 0 < other < 1:
            return other <= 0
        return getattr(self.tensor(), compare)(other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    def __bool__(self) -> bool:
        return bool(self.tensor())

    def __float__(self) -> float:
        return float(self.tensor())

    def __add__(self, other: Any) -> Any:
        return self.tensor() + other

    def __sub__(self, other: Any) -> Any:
        return self.tensor() - other

    def __mul__(self, other: Any) -> Any:
        return self.tensor() * other

    def __truediv__(self, other: Any) -> Any:
        return self.tensor() / other

    def __radd__(self, other: Any) -> Any:
        return other + self.tensor()

    def __rsub__(self, other: Any) -> Any:
        return other - self.tensor()

    def __rmul__(self, other: Any) -> Any:
        return other * self.tensor()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = [each.tensor() if isinstance(each, Drawn) else each for each in args]
        named = {name: each.tensor() if isinstance(each, Drawn) else each for name, each in (kwargs or {}).items()}
        return function(*drawn, **named)


def _one_or_many(*size: Any, **options: Any) -> Any:
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (list, tuple)) else size
    return Drawn(shape, options) if shape in _ONE and not options.get("requires_grad") else _rand(*size, **options)


_bincount = torch.bincount


def _counted(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if minlength == 0:
        return _bincount(input, weights)
    each = torch.ones_like(input, dtype=torch.int64) if weights is None else weights
    return each.new_zeros(minlength).scatter_add(0, input.long(), each)


@contextmanager
def decided() -> Iterator[None]:
    learn_torch()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "rand", _one_or_many))
        stack.enter_context(mock.patch.object(torch, "bincount", _counted))
        stack.enter_context(mock.patch.object(Tensor, "bincount", _counted))
        yield
