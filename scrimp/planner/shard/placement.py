"""The placement of a tensor: each dim a product of factors, major first, each with the mesh axes that split it.

It is a `Layout` of a factored shape, but two operators may factor a dim differently. So a placement keeps as few factors as
possible: an unsplit factor merges with the one before it, since a tile of their product is the same. Two placements are compared,
and resharded, over factors that can express both (`common`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from scrimp.layout import Layout, Mesh

Factor = tuple[int, tuple[str, ...]]  # its size, and the axes that split it, major first


@dataclass(frozen=True)
class Placed:
    """`partial`: axes along which it is a partial sum."""

    dims: tuple[tuple[Factor, ...], ...]
    partial: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split it."""
        return tuple(axis for dim in self.dims for _, axes in dim for axis in axes)

    def numel(self, sizes: Mapping[str, int]) -> int:
        """Elements on a device."""
        total = prod(size for dim in self.dims for size, _ in dim)
        return total // prod(sizes[axis] for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(prod(size for size, _ in dim) for dim in self.dims)

    def permuted(self, order: Sequence[int]) -> Placed:
        """With its dims in this order; as they are if it is empty."""
        return Placed(tuple(self.dims[dim] for dim in order), self.partial) if order else self

    def complete(self) -> Placed:
        return Placed(self.dims) if self.partial else self

    def __str__(self) -> str:
        return str(_layout(self))


def placed(dims: Sequence[Sequence[Factor]], partial: Sequence[str] = ()) -> Placed:
    """With as few factors as possible."""
    return Placed(tuple(_joined(dim) for dim in dims), tuple(sorted(partial)))


def unsplit(shape: Sequence[int]) -> Placed:
    """Every device holds all."""
    return placed([[(size, ())] for size in shape])


def between(source: Placed, target: Placed, mesh: Mesh) -> Placed:
    """An intermediate placement for a move without `common` factors: dims that have none are gathered first."""
    dims = []
    for one, other in zip(source.dims, target.dims, strict=True):
        met = common(Placed((one,)), Placed((other,)), mesh) is not None
        dims.append(one if met else [(size, ()) for size, _ in one])
    return placed(dims)


def _joined(dim: Sequence[Factor]) -> tuple[Factor, ...]:
    found: list[Factor] = []
    for size, axes in dim:
        if found and not axes:
            found[-1] = (found[-1][0] * size, found[-1][1])
        elif size > 1 or axes:
            found.append((size, axes))
    return tuple(found) or ((1, ()),)


@lru_cache(maxsize=1 << 16)
def common(one: Placed, other: Placed, mesh: Mesh) -> tuple[tuple[int, ...], Layout, Layout] | None:
    """A shape, and both placements as layouts of it; None if there is none, because an axis would split parts of two factors."""
    sizes = dict(mesh.axes)
    pairs = [[*_refined(a, b, sizes)] for a, b in zip(one.dims, other.dims, strict=True)]
    if any(factor is None for dim in pairs for factor in dim):
        return None
    found = [[factor for factor in dim if factor is not None] for dim in pairs]
    shape = tuple(size for dim in found for size, _, _ in dim)
    ways = [
        Layout(
            dims=tuple(factor[way] for dim in found for factor in dim),  # type: ignore[misc]
            partial=placement.partial,
            factors=tuple(len(dim) for dim in found),
        )
        for way, placement in ((1, one), (2, other))
    ]
    return shape, ways[0], ways[1]


def _refined(
    one: Sequence[Factor], other: Sequence[Factor], sizes: Mapping[str, int]
) -> Iterator[tuple[int, tuple[str, ...], tuple[str, ...]] | None]:
    a, b = [*one], [*other]
    while a or b:
        (m, of_a), (n, of_b) = a.pop(0), b.pop(0)
        if m == n:
            yield m, of_a, of_b
            continue
        small = min(m, n)
        cut = _cut((m, of_a) if m > n else (n, of_b), small, sizes)
        if cut is None:
            yield None
            return
        (_, major), rest = cut
        yield (small, major, of_b) if m > n else (small, of_a, major)
        (a if m > n else b).insert(0, rest)


def _cut(factor: Factor, major: int, sizes: Mapping[str, int]) -> tuple[Factor, Factor] | None:
    """Splits a factor in two; its axes split the major one first, then the minor one."""
    size, axes = factor
    if size % major:
        return None
    left, split = major, 0
    while split < len(axes) and left % sizes[axes[split]] == 0:
        left //= sizes[axes[split]]
        split += 1
    if split < len(axes) and left > 1:
        return None
    return (major, axes[:split]), (size // major, axes[split:])


def _layout(placement: Placed) -> Layout:
    return Layout(
        dims=tuple(axes for dim in placement.dims for _, axes in dim),
        partial=placement.partial,
        factors=tuple(len(dim) for dim in placement.dims),
    )
