"""Placements: equal where tiles are, and over factors that both can be said with."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scrimp.layout import Layout, Mesh
from scrimp.planner.shard.placement import Placed, common, placed

MESH = Mesh({"x": 2, "y": 4})


def elements(shape: tuple[int, ...], layout: Layout, rank: int) -> frozenset[int]:
    """Which elements of the flattened tensor a rank has, by numpy."""
    whole = np.arange(prod(shape)).reshape(shape)
    box = layout.tile(shape, MESH, rank)
    return frozenset(whole[tuple(slice(start, stop) for start, stop in box)].reshape(-1).tolist())


def test_a_factor_that_is_not_split_joins_the_one_before() -> None:
    assert placed([[(3, ("x",)), (4, ())]]) == placed([[(12, ("x",))]])
    assert placed([[(3, ()), (4, ("x",))]]) != placed([[(12, ("x",))]])
    assert str(placed([[(3, ()), (4, ("x",))], [(5, ())]], ["y"])) == "[(-)(x),-]+y"


def test_fused_heads_are_moved_over_their_factors() -> None:
    """192 = 3 x 64, the 64 split, to 192 split in blocks of rows."""
    heads, rows = placed([[(3, ()), (64, ("y",))]]), placed([[(192, ("y",))]])
    assert common(heads, rows, MESH) is None  # 4 parts of 192 do not end where the three do
    flat = placed([[(12, ("y",)), (16, ())]])
    found = common(flat, placed([[(4, ("y",)), (48, ("x",))]]), MESH)
    assert found == ((4, 48), Layout.parse("[(y)(-)]"), Layout.parse("[(y)(x)]"))


FACTORS = st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=3)


@st.composite
def placements(draw: st.DrawFn, total: int) -> Placed:
    """Of one dim."""
    dims, left, free = [], total, ["x", "y"]
    while left > 1:
        size = draw(st.sampled_from([n for n in (2, 4, 8, 16, 32, 64) if left % n == 0]))
        axes = draw(st.sampled_from([(), *[(axis,) for axis in free if size % dict(MESH.axes)[axis] == 0]]))
        free = [axis for axis in free if axis not in axes]
        dims.append((size, axes))
        left //= size
    return placed([dims])


@given(st.sampled_from([8, 16, 64]), st.data())
@settings(max_examples=150, deadline=None)
def test_what_is_common_has_the_same_tiles(total: int, data: st.DataObject) -> None:
    one, other = data.draw(placements(total)), data.draw(placements(total))
    found = common(one, other, MESH)
    if one == other:
        assert found is not None
    if found is None:
        return
    shape, *layouts = found
    assert prod(shape) == total
    for placement, layout in zip((one, other), layouts, strict=True):
        own = tuple(size for size, _ in placement.dims[0])
        text = Layout(dims=tuple(axes for _, axes in placement.dims[0]), factors=(len(own),))
        for rank in range(MESH.size):
            assert elements(shape, layout, rank) == elements(own, text, rank)
        assert len(elements(shape, layout, 0)) == placement.numel(dict(MESH.axes))
    same = all(elements(shape, layouts[0], rank) == elements(shape, layouts[1], rank) for rank in range(MESH.size))
    assert same == (one == other)
