"""The one form of layouts against the elements that members hold."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from scrimp.layout import Layout, Mesh
from scrimp.rules import simplest

SIZES = st.sampled_from((1, 2, 3, 4, 6))


def held(layout: Layout, sizes: tuple[int, ...], mesh: Mesh) -> list[frozenset[tuple[int, ...]]]:
    """Of each member the elements that it has, by their places in the dims."""
    counts = layout.factors or (1,) * len(layout.dims)
    out = []
    for rank in range(mesh.size):
        places: list[tuple[int, ...]] = [()]
        box, at = layout.tile(sizes, mesh, rank), 0
        for count in counts:
            along = [0]
            for factor in range(at, at + count):
                along = [place * sizes[factor] + inner for place in along for inner in range(*box[factor])]
            places = [(*place, each) for place in places for each in along]
            at += count
        out.append(frozenset(places))
    return out


@st.composite
def factored(draw: st.DrawFn, mesh: Mesh, counts: tuple[int, ...], sizes: tuple[int, ...]) -> Layout:
    dims: list[tuple[str, ...]] = [()] * len(sizes)
    for axis in draw(st.permutations(mesh.names)):
        can = [at for at, size in enumerate(sizes) if size % (prod(map(mesh.axis_size, dims[at])) * mesh.axis_size(axis)) == 0]
        at = draw(st.sampled_from([*can, None]))
        if at is not None:
            dims[at] = (*dims[at], axis)
    return Layout(dims=tuple(dims), factors=counts)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Mesh, tuple[Layout, tuple[int, ...]], tuple[Layout, tuple[int, ...]]]:
    """Two layouts of one tensor, each by factors of its own."""
    mesh = Mesh(dict(zip("xyz", draw(st.lists(st.sampled_from((1, 2, 3)), min_size=1, max_size=3)), strict=False)))
    primes = [draw(st.lists(st.sampled_from((2, 2, 3)), min_size=0, max_size=3)) for _ in range(draw(st.integers(1, 2)))]
    ways = []
    for _ in range(2):
        counts, sizes = [], []
        for each in primes:
            groups = [[1]]
            for prime in each:
                if draw(st.booleans()):
                    groups.append([prime])
                else:
                    groups[-1].append(prime)
            counts.append(len(groups))
            sizes += [prod(group) for group in groups]
        ways.append((draw(factored(mesh, tuple(counts), tuple(sizes))), tuple(sizes)))
    return mesh, ways[0], ways[1]


@given(pairs())
def test_forms_are_equal_where_members_hold_the_same(
    drawn: tuple[Mesh, tuple[Layout, tuple[int, ...]], tuple[Layout, tuple[int, ...]]],
) -> None:
    mesh, one, other = drawn
    for layout, sizes in (one, other):
        form, shape = simplest(layout, sizes, mesh)
        assert held(form, shape, mesh) == held(layout, sizes, mesh)
        assert simplest(form, shape, mesh) == (form, shape)
    same = held(*one, mesh) == held(*other, mesh)
    assert (simplest(*one, mesh) == simplest(*other, mesh)) == same


def test_rows_as_batch_times_sequence() -> None:
    mesh = Mesh({"x": 2, "y": 4})
    assert simplest(Layout.parse("[(x)(-),-]"), (4, 8, 6), mesh) == (Layout.parse("[x,-]"), (32, 6))
    assert simplest(Layout.parse("[(x)(y)]"), (2, 8), mesh) == (Layout.parse("[x*y]"), (16,))
    assert simplest(Layout.parse("[(x)(y)]+z"), (4, 8), Mesh({"x": 2, "y": 4, "z": 1})) == (Layout.parse("[(x)(y)]"), (4, 8))
    assert simplest(Layout.parse("[(-)(x)(-)]"), (3, 4, 2), mesh) == (Layout.parse("[(-)(x)]"), (3, 8))
