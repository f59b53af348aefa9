"""Profiles the memory of an operator: its outputs and everything its kernel allocates and frees, measured once.

Shapes, strides and dtypes decide it, so the profile of one call holds for all calls with the same signature.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from scrimp.chunks.meter.profiler_private import heard, listen

MOST_SIGNATURES = 20_000  # bounds the table where shapes never repeat
GENEROUS = 4  # guess, times the inputs: a product of bf16 matrices, summed in fp32, took 3 times its inputs


class Weight(NamedTuple):
    """`need_nbytes`: peak of what the operator allocated. `numbers`: plain numbers among its tensor arguments; torch wraps each
    in 8 bytes, and autograd may save them. `made_nbytes`: storages of its outputs. `out_nbytes`, `out_shape`: of its output, if
    that is one tensor."""

    need_nbytes: int
    numbers: int
    made_nbytes: int = 0
    out_nbytes: int = 0
    out_shape: tuple[int, ...] = ()


class Scale:
    """The table of profiles."""

    def __init__(self) -> None:
        self._weights: dict[Hashable, Weight] = {}
        self._most: dict[Any, int] = {}

    def known(self, signature: Hashable) -> Weight | None:
        try:
            return self._weights.get(signature)
        except TypeError:  # an unhashable argument
            return None

    def weigh(self, signature: Hashable, func: Any, args: Any, kwargs: Any) -> tuple[Any, Weight]:
        """Run an operator and measure it; returns its result and its profile, with 0 bytes if it cannot be measured."""
        need, listening = 0, listen()
        try:
            out = func(*args, **kwargs)
        finally:
            if listening:
                need = max(0, *accumulate(heard(), initial=0))
        dense = isinstance(out, torch.Tensor) and out.layout is torch.strided
        made = (out.nbytes, tuple(out.shape)) if dense else (0, ())
        weight = Weight(need, _numbers(func, args), min(need, _made_nbytes(out, args)), *made)
        if listening:
            self._keep(signature, weight)
            self._most[func] = max(need, self._most.get(func, 0))
        return out, weight

    def learn(self, signature: Hashable, weight: Weight) -> None:
        """A profile that was measured otherwise, of code that is no operator."""
        self._keep(signature, weight)

    def guess(self, func: Any, args: Any) -> int:
        """For a new signature: the most that the operator took so far, or a multiple of its inputs."""
        return max(GENEROUS * sum(tensor.nbytes for tensor in _tensors(args)), self._most.get(func, 0))

    def forget(self, signature: Hashable) -> None:
        """Its outputs were larger than profiled, so they depend on the data: profile it again next time."""
        if self.known(signature):
            del self._weights[signature]

    def _keep(self, signature: Hashable, weight: Weight) -> None:
        if len(self._weights) >= MOST_SIGNATURES:
            self._weights.clear()
        try:
            self._weights[signature] = weight
        except TypeError:
            return


def signature_of(func: Any, args: Any, kwargs: Any) -> Hashable:
    """What decides how much memory an operator takes. Floats do not, and may differ at every step: all count as one. Of an
    operator that communicates, neither do the group, for which torch makes a new object at every call, nor ranks and tags."""
    parts: list[Any] = [func]
    plain = not _communicates(func)
    for leaf in (*args, *kwargs, *kwargs.values()) if kwargs else args:
        if isinstance(leaf, torch.Tensor):
            parts += _kind(leaf)
        elif isinstance(leaf, (list, tuple)):
            parts.append(len(leaf))
            for part in leaf:
                parts.append(_kind(part) if isinstance(part, torch.Tensor) else part)
        elif plain:
            parts.append(float if isinstance(leaf, float) else leaf)
    return tuple(parts)


@cache
def _communicates(func: Any) -> bool:
    return str(func).startswith("c10d.")


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride() if tensor.layout is torch.strided else tensor.layout, tensor.dtype


def _made_nbytes(out: Any, args: Any) -> int:
    given = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
    made = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors((out,))}
    return sum(nbytes for key, nbytes in made.items() if key not in given)


def _numbers(func: Any, args: Any) -> int:
    wanted = zip(args, func._schema.arguments, strict=False)
    return sum(isinstance(leaf, (int, float, complex)) and isinstance(want.type, torch.TensorType) for leaf, want in wanted)


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    for leaf in args:
        for part in leaf if isinstance(leaf, (list, tuple)) else (leaf,):
            if isinstance(part, torch.Tensor) and part.layout is torch.strided:
                yield part
