"""What hypothesis draws: meshes, layouts in any order, shapes that divide evenly and shapes that do not."""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

from scrimp.layout import Layout, Mesh

AXIS_SIZES = (1, 2, 3, 4, 6, 8)


@st.composite
def meshes(draw: st.DrawFn, most: int = 64, axes: int = 4) -> Mesh:
    sizes: list[int] = []
    for size in draw(st.lists(st.sampled_from(AXIS_SIZES), min_size=1, max_size=axes)):
        if prod(sizes) * size <= most:
            sizes.append(size)
    return Mesh(dict(zip("xyzw", sizes, strict=False)))


@st.composite
def layouts(draw: st.DrawFn, mesh: Mesh, rank: int, *, partial: bool = False, subs: bool = False) -> Layout:
    """Axes in any order, each on a dim, free, or (if asked for) partial; `subs` splits axes into their primes first."""
    names = list(mesh.sub_axes if subs and draw(st.booleans()) else mesh.names)
    order = draw(st.permutations(names))
    dims: list[list[str]] = [[] for _ in range(rank)]
    sums = []
    for axis in order:
        place = draw(st.integers(-2 if partial else -1, rank - 1))
        if place >= 0:
            dims[place].append(axis)
        elif place == -2:
            sums.append(axis)
    return Layout(dims=tuple(map(tuple, dims)), partial=tuple(sums))


@st.composite
def shapes(draw: st.DrawFn, mesh: Mesh, rank: int, *, even: bool = False, most: int = 2048) -> tuple[int, ...]:
    """Small enough to simulate. Even dims are multiples of what any layout may ask for, if that is small enough."""
    sizes = []
    for _ in range(rank):
        size = mesh.size if (even or draw(st.booleans())) else draw(st.integers(0, 9))
        sizes.append(size if even or prod(sizes) * max(size, 1) <= most else draw(st.integers(1, 3)))
    return tuple(sizes)
