"""Weights at rest: a weight's tile in use, flat, is sharded further over axes along which it is replicated.

    in use      tile k of T, of n elements           [tiles, -]
    at rest     a share of that tile                 [tiles, axes]

Weight, gradient and optimizer states each have axes of their own (the ZeRO outcomes). As an array of T x n elements all changes
between them are ordinary moves: a gather is [tiles, axes] -> [tiles, -], and a gradient that is a partial sum is accumulated by
[tiles, -]+summed -> [tiles, axes], which is a reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from scrimp.layout import Layout, Mesh
from scrimp.planner import GRADIENTS, STATES, WEIGHTS, Placed, axes_at_rest


@dataclass(frozen=True, kw_only=True)
class Rest:
    """`weight`, `gradient`, `states`: the axes over which each is sharded beyond the placement in use."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    use: Placed
    weight: tuple[str, ...]
    gradient: tuple[str, ...]
    states: tuple[str, ...]

    def flat_shape(self, mesh: Mesh) -> tuple[int, int]:
        tiles = prod(mesh.axis_size(axis) for axis in self.use.axes)
        return tiles, prod(self.shape) // tiles

    def layout(self, axes: tuple[str, ...], partial: tuple[str, ...] = ()) -> Layout:
        return Layout(dims=(self.use.axes, axes), partial=partial)

    def numel(self, axes: tuple[str, ...], mesh: Mesh) -> int:
        """Elements of a device's share, the largest."""
        return -(-self.flat_shape(mesh)[1] // prod(mesh.axis_size(axis) for axis in axes))


def rest_of(
    name: str, shape: tuple[int, ...], dtype: str, use: Placed, level: tuple[int, ...], mesh: Mesh, *, trained: bool
) -> Rest:
    axes = axes_at_rest(use.axes, level, mesh)
    return Rest(
        name=name, shape=shape, dtype=dtype, trained=trained, use=use, weight=axes[WEIGHTS], gradient=axes[GRADIENTS],
        states=axes[STATES],
    )  # fmt: skip
