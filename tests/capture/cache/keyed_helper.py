"""What `keyed_model` imports."""

from __future__ import annotations

from torch import Tensor

OFFSET = 0.25


def twice(x: Tensor) -> Tensor:
    return x + x


def shifted(x: Tensor) -> Tensor:
    return _inner(x) + OFFSET


def _inner(x: Tensor) -> Tensor:
    return x * 3
