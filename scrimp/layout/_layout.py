"""A layout: for each dim the mesh axes that shard it, major first, and the axes along which the array is a partial sum.

    [x*y,-]      dim 0 over x then y, dim 1 unsharded
    [-,x]+y      dim 1 over x, and every device holds one summand of a sum over y
    []           a scalar, replicated on all devices
    [(-)(tp),dp] dim 0 is a product of two factors, the inner one over tp: a layout of the factored shape

Axes that are not named hold replicas. A layout has no mesh and no shape; its methods take them as arguments. Tiles: a dim of size
g over n devices has tiles of c = ceil(g / n), the k-th being [k*c, min((k+1)*c, g)), so that late tiles may be short or empty and
rank 0 always holds a largest one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from scrimp.errors import LayoutError
from scrimp.layout._mesh import Mesh

Box = tuple[tuple[int, int], ...]  # per dim [start, stop)

_AXIS = r"[a-z][a-z0-9_]*(?:\.[0-9]+)?"
_AXES = re.compile(rf"{_AXIS}(?:\*{_AXIS})*")
_LAYOUT = re.compile(r"\[(?P<dims>[^\[\]]*)\](?P<partial>(?:\+[^+]+)*)")
_FACTORS = re.compile(r"(?:\([^()]*\))+")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Build it with `Layout.parse("[x,-]+y")`. `dims` has one entry for each dim (for each factor of a
    factored dim), `factors` says how many entries make up each dim and is empty when it is one each.

    >>> import scrimp
    >>> mesh = scrimp.Mesh({"x": 2, "y": 4})
    >>> layout = scrimp.Layout.parse("[x,-]")
    >>> layout.local_shape((8, 6), mesh, rank=0), layout.replicas(mesh)
    ((4, 6), 4)
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    factors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "partial", tuple(sorted(self.partial)))
        if all(count == 1 for count in self.factors):
            object.__setattr__(self, "factors", ())
        if self.factors and sum(self.factors) != len(self.dims):
            raise LayoutError(f"layout has {len(self.dims)} entries, but its factors {self.factors} ask for {sum(self.factors)}")
        names = [axis for axes in self.dims for axis in axes] + list(self.partial)
        for axis in names:
            if names.count(axis) > 1:
                raise LayoutError(f"layout {self}: axis '{axis}' is used twice; an axis may split one dim, or be partial, once")

    @staticmethod
    def parse(text: str | Layout) -> Layout:
        return text if isinstance(text, Layout) else _parse(text)

    def __str__(self) -> str:
        entries = ["*".join(axes) or "-" for axes in self.dims]
        if self.factors:
            grouped, start = [], 0
            for count in self.factors:
                group = entries[start : start + count]
                grouped.append(group[0] if count == 1 else "".join(f"({entry})" for entry in group))
                start += count
            entries = grouped
        return f"[{','.join(entries)}]" + "".join(f"+{axis}" for axis in self.partial)

    @property
    def rank(self) -> int:
        """How many entries a shape for this layout has (a factored dim counts once per factor)."""
        return len(self.dims)

    # Methods that need a mesh.

    def validate(self, mesh: Mesh, shape: Sequence[int] | None = None) -> None:
        """Raise a `LayoutError` unless the layout fits the mesh and, if given, the shape."""
        names = [axis for axes in self.dims for axis in axes] + list(self.partial)
        try:
            owners = [(sub, axis) for axis in names for sub in mesh.split(axis)]
        except LayoutError as error:
            raise LayoutError(f"layout {self}: {error}") from None
        seen: dict[str, str] = {}
        for sub, axis in owners:
            if sub in seen:
                raise LayoutError(f"layout {self}: '{seen[sub]}' and '{axis}' both use '{sub}' of the mesh {mesh}")
            seen[sub] = axis
        if shape is None:
            return
        if len(shape) != self.rank:
            raise LayoutError(f"layout {self} has {self.rank} dims, but the shape {tuple(shape)} has {len(shape)}")
        for size in shape:
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise LayoutError(f"shape {tuple(shape)}: {size!r} is not a size; sizes are whole numbers of 0 or more")

    def counts(self, mesh: Mesh) -> tuple[int, ...]:
        """The number of tiles along each dim."""
        return tuple(prod(mesh.axis_size(axis) for axis in axes) for axes in self.dims)

    def tile_index(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The index of a rank's tile along each dim."""
        return tuple(mesh.index(rank, axes) for axes in self.dims)

    def tile(self, shape: Sequence[int], mesh: Mesh, rank: int, padded: Sequence[int] | None = None) -> Box:
        """A rank's part of the array, as [start, stop) per dim. `padded`: the sizes to cut into tiles instead of the array's own:
        inside a move all layouts share one padding."""
        box = []
        for size, whole, count, k in zip(shape, padded or shape, self.counts(mesh), self.tile_index(mesh, rank), strict=True):
            chunk = -(-whole // count)
            box.append((min(k * chunk, size), min((k + 1) * chunk, size)))
        return tuple(box)

    def local_shape(
        self, shape: Sequence[int], mesh: Mesh, rank: int = 0, padded: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """The shape of a rank's tile; rank 0 has a largest one."""
        return tuple(stop - start for start, stop in self.tile(shape, mesh, rank, padded))

    def local_numel(self, shape: Sequence[int], mesh: Mesh, padded: Sequence[int] | None = None) -> int:
        """Elements in the largest tile."""
        return prod(
            min(size, -(-whole // count)) for size, whole, count in zip(shape, padded or shape, self.counts(mesh), strict=True)
        )

    def replicas(self, mesh: Mesh) -> int:
        """The number of devices that hold the same bytes."""
        return mesh.size // prod(self.counts(mesh)) // prod(mesh.axis_size(axis) for axis in self.partial)

    def redundant_numel(self, shape: Sequence[int], mesh: Mesh) -> int:
        """Elements held over all devices beyond one copy of the array."""
        copies = mesh.size // prod(self.counts(mesh))  # each tile of the grid is held so often
        return (copies - 1) * prod(shape)

    def redundant_nbytes(self, shape: Sequence[int], mesh: Mesh, itemsize: int) -> int:
        return self.redundant_numel(shape, mesh) * itemsize

    # Layouts made from this one.

    def grad(self) -> Layout:
        """The layout of this array's gradient: partial axes become replicas."""
        return Layout(dims=self.dims, factors=self.factors)

    def split(self, mesh: Mesh) -> Layout:
        """The same layout over prime sub-axes; axes of size 1 vanish."""
        return Layout(
            dims=tuple(tuple(sub for axis in axes for sub in mesh.split(axis)) for axes in self.dims),
            partial=tuple(sub for axis in self.partial for sub in mesh.split(axis)),
            factors=self.factors,
        )

    def merge(self, mesh: Mesh) -> Layout:
        """The same layout with complete runs of sub-axes replaced by their axis."""
        return Layout(
            dims=tuple(merge_axes(axes, mesh) for axes in self.dims),
            partial=merge_axes(self.partial, mesh),
            factors=self.factors,
        )


def merge_axes(axes: Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    """('y.0', 'y.1', 'x') -> ('y', 'x') on a mesh where y has just these two sub-axes."""
    merged: list[str] = []
    position = 0
    while position < len(axes):
        whole = axes[position].partition(".")[0]
        subs = mesh.split(whole)
        if subs and tuple(axes[position : position + len(subs)]) == subs:
            merged.append(whole)
            position += len(subs)
        else:
            merged.append(axes[position])
            position += 1
    return tuple(merged)


def intersect(a: Box, b: Box) -> Box:
    """The intersection of two boxes; a side without overlap has length 0."""
    both = (((max(a0, b0)), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True))
    return tuple((start, max(start, stop)) for start, stop in both)


def box_numel(box: Box) -> int:
    return prod(stop - start for start, stop in box)


@lru_cache(maxsize=4096)
def _parse(text: str) -> Layout:
    if not isinstance(text, str):
        raise LayoutError(f"a layout is a Layout or a text like '[x,-]+y', not {text!r}")
    match = _LAYOUT.fullmatch(re.sub(r"\s+", "", text))
    if match is None:
        raise LayoutError(f"layout '{text}': expected one entry per dim in brackets, then partial axes, as in '[x*y,-]+z'")
    dims: list[tuple[str, ...]] = []
    factors: list[int] = []
    for entry in match["dims"].split(",") if match["dims"] else []:
        parts = list(_factor_entries(entry))
        dims += [_parse_axes(part, text) for part in parts]
        factors.append(len(parts))
    partial = [axis for part in match["partial"].split("+")[1:] for axis in _parse_axes(part, text)]
    return Layout(dims=tuple(dims), partial=tuple(partial), factors=tuple(factors))


def _factor_entries(entry: str) -> Iterator[str]:
    if _FACTORS.fullmatch(entry):
        yield from entry[1:-1].split(")(")
    else:
        yield entry


def _parse_axes(entry: str, text: str) -> tuple[str, ...]:
    if entry == "-":
        return ()
    if not _AXES.fullmatch(entry):
        raise LayoutError(f"layout '{text}': '{entry}' is neither '-' nor axes joined by '*', such as x or x*y")
    return tuple(entry.split("*"))
