"""Layouts: the text form, tiles, what a layout refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.errors import LayoutError
from scrimp.layout import Layout, Mesh, box_numel, intersect
from tests.support.strategies import layouts, meshes, shapes


@st.composite
def placed(draw: st.DrawFn) -> tuple[Mesh, tuple[int, ...], Layout]:
    mesh = draw(meshes())
    rank = draw(st.integers(0, 4))
    return mesh, draw(shapes(mesh, rank)), draw(layouts(mesh, rank, partial=True, subs=True))


@given(placed())
def test_text_form_round_trips(case: tuple[Mesh, tuple[int, ...], Layout]) -> None:
    mesh, _, layout = case
    assert Layout.parse(str(layout)) == layout
    assert layout.split(mesh).merge(mesh).split(mesh) == layout.split(mesh)
    assert Mesh.parse(str(mesh)) == mesh


@given(placed())
def test_tiles_cover_the_array_as_often_as_there_are_copies(case: tuple[Mesh, tuple[int, ...], Layout]) -> None:
    mesh, shape, layout = case
    held = np.zeros(shape, dtype=np.int64)
    for rank in range(mesh.size):
        tile = layout.tile(shape, mesh, rank)
        held[tuple(slice(a, b) for a, b in tile)] += 1
        assert layout.local_shape(shape, mesh, rank) == tuple(b - a for a, b in tile)
        assert box_numel(tile) <= layout.local_numel(shape, mesh)
    summands = int(np.prod([mesh.axis_size(axis) for axis in layout.partial], dtype=int))
    assert (held == layout.replicas(mesh) * summands).all()
    assert layout.redundant_numel(shape, mesh) == int(held.sum()) - held.size
    if layout.local_shape(shape, mesh, 0):
        assert box_numel(layout.tile(shape, mesh, 0)) == layout.local_numel(shape, mesh)


@given(placed())
def test_split_means_the_same_placement(case: tuple[Mesh, tuple[int, ...], Layout]) -> None:
    mesh, shape, layout = case
    split = layout.split(mesh)
    for rank in range(mesh.size):
        assert split.tile(shape, mesh, rank) == layout.tile(shape, mesh, rank)
    assert split.grad().partial == ()


@given(meshes())
def test_coordinates_number_the_ranks_row_major(mesh: Mesh) -> None:
    expected = list(itertools.product(*(range(size) for _, size in mesh.axes)))
    assert [tuple(mesh.coordinate(rank, axis) for axis in mesh.names) for rank in range(mesh.size)] == expected
    for axis in mesh.names:
        whole = [mesh.coordinate(rank, axis) for rank in range(mesh.size)]
        by_subs = [0] * mesh.size
        for sub in mesh.split(axis):
            by_subs = [k * mesh.axis_size(sub) + mesh.coordinate(rank, sub) for rank, k in enumerate(by_subs)]
        assert whole == by_subs
    for axes in itertools.permutations(mesh.names):
        grid = [*itertools.product(*(range(mesh.axis_size(axis)) for axis in axes))]
        found = [mesh.index(rank, axes) for rank in range(mesh.size)]
        assert [grid[index] for index in found] == [
            tuple(mesh.coordinate(rank, axis) for axis in axes) for rank in range(mesh.size)
        ]


def test_examples_of_the_text_form() -> None:
    mesh = Mesh({"x": 2, "y": 4})
    layout = Layout.parse(" [ x*y , - ] + z ")
    assert layout == Layout(dims=(("x", "y"), ()), partial=("z",))
    assert str(Layout.parse("[-,x]+y")) == "[-,x]+y"
    assert Layout.parse("[]").rank == 0
    assert str(Layout.parse("[x,y]").split(mesh)) == "[x,y.0*y.1]"
    assert Layout.parse("[-,x]+y").grad() == Layout.parse("[-,x]")
    assert Layout.parse(layout) is layout


def test_a_factored_dim_is_a_layout_of_the_factored_shape() -> None:
    mesh = Mesh({"dp": 2, "tp": 4})
    qkv = Layout.parse("[(-)(tp),dp]")
    assert str(qkv) == "[(-)(tp),dp]"
    assert (qkv.rank, qkv.factors) == (3, (2, 1))
    assert qkv.local_shape((3, 8, 16), mesh) == (3, 2, 8)
    assert Layout.parse("[(-)(tp),dp]+x").grad() == qkv


def test_uneven_tiles_are_flat_not_nested() -> None:
    mesh = Mesh({"x": 2, "y": 2})
    assert [Layout.parse("[x*y]").tile((5,), mesh, rank) for rank in range(4)] == [((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)]


def test_intersect() -> None:
    assert intersect(((0, 4), (2, 6)), ((3, 9), (0, 2))) == ((3, 4), (2, 2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Mesh({"X": 2}), ["'X'", "small letter"]),
        (lambda: Mesh({"x": 0}), ["'x'", "0", "1 or more"]),
        (lambda: Mesh([("x", 2), ("x", 3)]), ["'x'", "twice"]),
        (lambda: Mesh.parse("x=2,y"), ["'y'", "name=size"]),
        (lambda: Layout.parse("x,y"), ["x,y", "brackets"]),
        (lambda: Layout.parse("[x,,y]"), ["''", "[x,,y]"]),
        (lambda: Layout.parse("[x,x]"), ["'x'", "twice"]),
        (lambda: Layout.parse("[x]+x"), ["'x'", "twice"]),
        (lambda: Layout.parse("[q]").validate(Mesh({"x": 2})), ["'q'", "[q]", "x=2"]),
        (lambda: Layout.parse("[y,y.0]").validate(Mesh({"y": 4})), ["'y'", "'y.0'", "y=4"]),
        (lambda: Layout.parse("[x]").validate(Mesh({"x": 2}), (4, 4)), ["[x]", "1 dims", "(4, 4)", "2"]),
        (lambda: Layout.parse("[x]").validate(Mesh({"x": 2}), (-4,)), ["-4", "0 or more"]),
        (lambda: Layout(dims=((), ()), factors=(3,)), ["2 entries", "3"]),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(make: object, words: list[str]) -> None:
    with pytest.raises(LayoutError) as caught:
        make()  # type: ignore[operator]
    for word in words:
        assert word in str(caught.value), str(caught.value)
