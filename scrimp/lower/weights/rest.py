"""Weights at rest: a weight's tile in use, flat, is sharded further over axes along which it is replicated.

    in use      tile k of T, of n elements           [tiles, -]
    at rest     a share of that tile                 [tiles, axes]

Weight, gradient and optimizer states each have axes of their own (the ZeRO outcomes). As an array of T x n elements all changes
between them are ordinary moves: a gather is [tiles, axes] -> [tiles, -], and a gradient that is a partial sum is accumulated by
[tiles, -]+summed -> [tiles, axes], which is a reduce-scatter.

The axes of the weight come first among those of the gradient, and these among those of the states; and n is padded to a multiple
of all shares. So a rank's share of the states is a part of its share of the gradient, and that a part of its share of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from scrimp.layout import Layout, Mesh
from scrimp.planner import GRADIENTS, STATES, WEIGHTS, Placed, axes_at_rest

Shared = tuple[tuple[str, ...], tuple[str, ...]]  # axes that shard a tile, and axes along which the shares are partial sums


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

    def tile_numel(self, mesh: Mesh) -> int:
        """Elements of a tile, without padding."""
        return prod(self.shape) // prod(mesh.axis_size(axis) for axis in self.use.axes)

    def flat_shape(self, mesh: Mesh) -> tuple[int, int]:
        tiles, shares = (prod(mesh.axis_size(axis) for axis in axes) for axes in (self.use.axes, self.states))
        return tiles, -(-self.tile_numel(mesh) // shares) * shares

    def span(self, axes: tuple[str, ...], mesh: Mesh, rank: int) -> tuple[int, int]:
        """A rank's share of its tile over some axes, as elements [start, stop) of the padded tile."""
        return self.layout(axes).tile(self.flat_shape(mesh), mesh, rank)[1]

    def layout(self, axes: tuple[str, ...], partial: tuple[str, ...] = ()) -> Layout:
        return Layout(dims=(self.use.axes, axes), partial=partial)

    def numel(self, axes: tuple[str, ...], mesh: Mesh) -> int:
        """Elements of a device's share."""
        return self.flat_shape(mesh)[1] // prod(mesh.axis_size(axis) for axis in axes)

    def later(self, partial: tuple[str, ...] | None, *, accumulated: bool) -> tuple[str, ...]:
        """The axes along which ranks keep their summands of the gradient and sum them once, at the end of a step: where they hold
        more of the gradient than of the states, or accumulate it over micro-batches. `partial`: the axes along which all that
        arrives is a partial sum; None if that differs."""
        if partial is None or (self.gradient == self.states and not accumulated):
            return ()
        return tuple(axis for axis in partial if axis not in (*self.gradient, *self.use.axes))


def rest_of(
    name: str, shape: tuple[int, ...], dtype: str, use: Placed, level: tuple[int, ...], mesh: Mesh, *, trained: bool
) -> Rest:
    axes = axes_at_rest(use.axes, level, mesh)
    weight = axes[WEIGHTS]
    gradient = (*weight, *(axis for axis in axes[GRADIENTS] if axis not in weight))
    states = (*gradient, *(axis for axis in axes[STATES] if axis not in gradient))
    return Rest(name=name, shape=shape, dtype=dtype, trained=trained, use=use, weight=weight, gradient=gradient, states=states)
