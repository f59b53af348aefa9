"""Tiles of all ranks at once, as arrays, and what each rank receives in a step.

`low[d, p]` and `high[d, p]` bound rank p's part of dim d.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from scrimp.layout import Layout, Mesh

Ranks = npt.NDArray[np.int64]  # one entry per rank, or one row per dim of such


@dataclass(frozen=True, kw_only=True)
class Tiles:
    low: Ranks
    high: Ranks
    chunk: tuple[int, ...]

    @property
    def numel(self) -> Ranks:
        return _product(self.high - self.low)


@lru_cache(maxsize=512)
def tiles(layout: Layout, shape: tuple[int, ...], mesh: Mesh, padded: tuple[int, ...] | None = None) -> Tiles:
    ranks = np.arange(mesh.size, dtype=np.int64)
    low = np.zeros((len(shape), mesh.size), dtype=np.int64)
    high = np.zeros_like(low)
    chunks = []
    for dim, (size, whole, axes, count) in enumerate(zip(shape, padded or shape, layout.dims, layout.counts(mesh), strict=True)):
        index = np.zeros_like(ranks)
        for axis in axes:
            index = index * mesh.axis_size(axis) + ranks // mesh.axis_stride(axis) % mesh.axis_size(axis)
        chunk = -(-whole // count)
        chunks.append(chunk)
        low[dim] = np.minimum(index * chunk, size)
        high[dim] = np.minimum((index + 1) * chunk, size)
    return Tiles(low=low, high=high, chunk=tuple(chunks))


def missing_numel(have: Tiles, want: Tiles) -> Ranks:
    """Per rank, elements of the wanted tile that it lacks."""
    shared = np.minimum(have.high, want.high) - np.maximum(have.low, want.low)
    return want.numel - _product(np.maximum(shared, 0))


def sources(have: Tiles, want: Tiles) -> Ranks:
    """Per rank, the number of other tiles that it needs parts of."""
    count = np.ones(want.low.shape[1], dtype=np.int64)
    for dim, chunk in enumerate(have.chunk):
        low, high = want.low[dim], want.high[dim]
        count *= np.where(high > low, (np.maximum(high, 1) - 1) // max(chunk, 1) - low // max(chunk, 1) + 1, 0)
    shared = np.minimum(have.high, want.high) - np.maximum(have.low, want.low)
    own = np.all(shared > 0, axis=0)
    return np.asarray(np.maximum(count - own, 0))


def _product(sizes: Ranks) -> Ranks:
    return np.asarray(np.prod(sizes, axis=0, dtype=np.int64))
