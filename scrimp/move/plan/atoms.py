"""Atoms, the units of the search: prime sub-axes, or runs of them that stay together in source and target."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from scrimp.cluster import Cluster
from scrimp.layout import Layout, Mesh
from scrimp.move.plan.space import Space, Type


@dataclass(frozen=True, kw_only=True)
class Atoms:
    """`names[k]` are the prime sub-axes of atom k, major first."""

    names: tuple[tuple[str, ...], ...]

    def axes(self, atoms: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(axis for atom in atoms for axis in self.names[atom])

    def layout(self, dims: Type, like: Layout, partial: tuple[str, ...]) -> Layout:
        return Layout(dims=tuple(self.axes(atoms) for atoms in dims), partial=partial, factors=like.factors)

    def type_of(self, layout: Layout) -> Type:
        first = {names[0]: atom for atom, names in enumerate(self.names)}
        return tuple(tuple(first[axis] for axis in axes if axis in first) for axes in layout.dims)

    def space(
        self,
        shape: tuple[int, ...],
        padded: tuple[int, ...],
        mesh: Mesh,
        src: Layout,
        dst: Layout,
        cluster: Cluster,
        itemsize: int,
        *,
        by_size: bool,
    ) -> Space:
        links = [cluster.link(names) for names in self.names]
        reduced = {*src.partial} - {*dst.partial}
        return Space(
            shape=shape,
            padded=padded,
            cap=max(src.local_numel(shape, mesh), dst.local_numel(shape, mesh)),
            sizes=tuple(prod(mesh.axis_size(axis) for axis in names) for names in self.names),
            latency=tuple(link.latency_seconds for link in links),
            pace=tuple(itemsize / link.bytes_per_second for link in links),
            src=self.type_of(src),
            dst=self.type_of(dst),
            reduced=tuple(atom for atom, names in enumerate(self.names) if names[0] in reduced),
            kept=tuple(atom for atom, names in enumerate(self.names) if names[0] in dst.partial),
            by_size=by_size,
        )


def prime_atoms(mesh: Mesh) -> Atoms:
    return Atoms(names=tuple((axis,) for axis in mesh.sub_axes))


def glued_atoms(mesh: Mesh, src: Layout, dst: Layout) -> Atoms:
    """Joins an axis to the one before it if in both layouts it comes right after it or both are unused."""
    place_src, place_dst = _places(src), _places(dst)

    def together(a: str, b: str) -> bool:
        for place in (place_src, place_dst):
            at_a, at_b = place.get(a), place.get(b)
            if (at_a is None) != (at_b is None):
                return False
            if at_a is not None and at_b is not None and at_b != (at_a[0], at_a[1] + 1):
                return False
        if a not in place_src and a not in place_dst and a.partition(".")[0] != b.partition(".")[0]:
            return False  # unused axes of different names may have different links
        partial = [(a in layout.partial, b in layout.partial) for layout in (src, dst)]
        return all(in_a == in_b for in_a, in_b in partial)

    runs: list[list[str]] = []
    for axis in _reading_order(mesh, src, dst):
        if runs and together(runs[-1][-1], axis):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    return Atoms(names=tuple(tuple(run) for run in runs))


def _places(layout: Layout) -> dict[str, tuple[int, int]]:
    return {axis: (dim, k) for dim, axes in enumerate(layout.dims) for k, axis in enumerate(axes)}


def _reading_order(mesh: Mesh, src: Layout, dst: Layout) -> list[str]:
    """Axes of src in its order, then those of dst, then the rest as in the mesh."""
    order = [axis for layout in (src, dst) for axes in layout.dims for axis in axes] + list(mesh.sub_axes)
    return list(dict.fromkeys(order))
