"""`MoveCosts` against `synthesize` itself."""

from __future__ import annotations

import itertools
from math import inf, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scrimp.cluster import Cluster, Link
from scrimp.errors import LayoutError, MoveError
from scrimp.layout import Layout, Mesh
from scrimp.move import MoveCosts, synthesize
from scrimp.move.plan.cost import DTYPES, NEAR
from tests.support.strategies import layouts

MESHES = [Mesh({"x": 8}), Mesh({"x": 2, "y": 4}), Mesh({"x": 4, "y": 8}), Mesh({"x": 2, "y": 2, "z": 2})]
CLUSTERS = [
    Cluster(),
    Cluster(axes=(("x", Link(bytes_per_second=2e9)),)),
    Cluster(default=Link(latency_seconds=5e-6, bytes_per_second=450e9), axes=(("x", Link(bytes_per_second=50e9)),)),
    Cluster.preset("32xH100"),
]
# One of each for the whole module: what they remember of earlier moves must not show.
KEPT = {(m, c, e): MoveCosts(MESHES[m], CLUSTERS[c], exact=e) for m in range(4) for c in range(4) for e in (True, False)}


def reachable(data: st.DataObject, mesh: Mesh, rank: int) -> tuple[Layout, Layout]:
    src = data.draw(layouts(mesh, rank, partial=True, subs=True))
    dst = data.draw(layouts(mesh, rank, partial=True, subs=True))
    kept = tuple(axis for axis in dst.partial if axis in src.split(mesh).partial or axis in src.partial)
    return src, Layout(dims=dst.dims, partial=kept)


@settings(max_examples=250, deadline=None)
@given(data=st.data(), m=st.integers(0, 3), c=st.integers(0, 3))
def test_the_figures_of_synthesize(data: st.DataObject, m: int, c: int) -> None:
    mesh, costs = MESHES[m], KEPT[m, c, True]
    rank = data.draw(st.integers(1, 3))
    src, dst = reachable(data, mesh, rank)
    scale = st.sampled_from([1, 2, 3, 5, 64])
    tiles = [prod(layout.counts(mesh)) for layout in (src, dst)]
    even = data.draw(st.booleans())
    shape = tuple(data.draw(scale) * (prod(tiles) if even else data.draw(st.sampled_from([1, 7, 32]))) for _ in range(rank))
    itemsize = data.draw(st.sampled_from([2, 4]))
    program = synthesize(shape, mesh, src, dst, dtype=DTYPES[itemsize], cluster=CLUSTERS[c])
    for _ in range(2):
        cost = costs.cost(shape, itemsize, src, dst)
        assert cost.seconds == pytest.approx(program.seconds, rel=1e-9, abs=0)
        assert cost.peak_nbytes == program.peak_numel * itemsize
        assert cost.received_nbytes == program.received_nbytes


def test_what_is_remembered_of_one_shape_is_not_taken_for_another() -> None:
    """As many elements, but other numbers of tiles; as many tiles, but other elements or bytes."""
    mesh, costs = Mesh({"x": 2, "y": 4}), MoveCosts(Mesh({"x": 2, "y": 4}))
    seen = set()
    for shape, itemsize in itertools.product(((8184, 1023), (4092, 2046), (8, 1), (16, 3), (8184, 4092)), (2, 4, 8)):
        for dst in ("[y,-]", "[-,-]", "[x*y,-]"):
            if shape[0] % 8 and dst == "[x*y,-]":
                continue
            program = synthesize(shape, mesh, "[-,-]+y", dst, dtype=DTYPES[itemsize])
            cost = costs.cost(shape, itemsize, "[-,-]+y", dst)
            assert (cost.seconds, cost.received_nbytes) == (program.seconds, program.received_nbytes)
            seen.add((prod(shape), itemsize, dst, round(cost.seconds, 9)))
    assert len({row[:3] for row in seen}) < len(seen)  # elements, bytes and layouts alone do not say it


@settings(max_examples=250, deadline=None)
@given(data=st.data(), m=st.integers(0, 3), c=st.integers(0, 3))
def test_without_exact_the_figures_of_a_move_that_is_alike(data: st.DataObject, m: int, c: int) -> None:
    """Within NEAR of some move that differs in the names of dims, and of axes with the same size and link."""
    mesh, costs = MESHES[m], KEPT[m, c, False]
    src, dst = reachable(data, mesh, 3)
    shape = tuple(mesh.size * data.draw(st.sampled_from([1, 2, 8, 64])) for _ in range(3))
    cost = costs.cost(shape, 2, src, dst)
    assert cost.peak_nbytes == 2 * max(layout.local_numel(shape, mesh) for layout in (src, dst))
    alike = [
        synthesize(tuple(shape[d] for d in order), mesh, a, b, dtype="bfloat16", cluster=CLUSTERS[c])
        for names in _exchanges(mesh, costs.cluster)
        for order in itertools.permutations(range(3))
        for a, b in [(_renamed(src, order, names), _renamed(dst, order, names))]
    ]
    least, most = (pick(program.seconds for program in alike) for pick in (min, max))
    assert least * (1 - 1e-9) <= cost.seconds <= most * (1 + NEAR) + 1e-15


def _exchanges(mesh: Mesh, cluster: Cluster) -> list[dict[str, str]]:
    """Renamings of axes that leave size and link."""
    every = [dict(zip(mesh.names, names, strict=True)) for names in itertools.permutations(mesh.names)]
    return [
        names
        for names in every
        if all(mesh.axis_size(a) == mesh.axis_size(b) and cluster.link([a]) == cluster.link([b]) for a, b in names.items())
    ]


def _renamed(layout: Layout, order: tuple[int, ...], names: dict[str, str]) -> Layout:
    def new(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names[axis.split(".")[0]] + axis[len(axis.split(".")[0]) :] for axis in axes)

    return Layout(dims=tuple(new(layout.dims[d]) for d in order), partial=new(layout.partial))


@pytest.mark.parametrize("exact", [True, False])
def test_moves_that_cost_nothing_and_moves_that_cannot_be(exact: bool) -> None:
    costs = MoveCosts(Mesh({"x": 2, "y": 4}), exact=exact)
    for src, dst in (("[x,-]", "[x,-]"), ("[-,-]", "[x,y]"), ("[x,-]", "[x*y,-]"), ("[-,-]+x", "[y,-]+x")):
        assert costs.cost((64, 64), 4, src, dst).seconds == 0
        assert costs.cost((64, 64), 4, src, dst).received_nbytes == 0
    assert costs.syntheses == 0
    for shape in ((64, 64), (7, 9)):
        never = costs.cost(shape, 2, "[x,-]", "[x,-]+y")
        assert (never.seconds, never.received_nbytes) == (inf, 0)
        assert never.peak_nbytes == 2 * -(-shape[0] // 2) * shape[1]
    with pytest.raises(LayoutError, match="axis 'z'"):
        costs.cost((64, 64), 2, "[z,-]", "[-,-]")
    with pytest.raises(LayoutError, match="has 1 dims"):
        costs.cost((64, 64), 2, "[x]", "[-]")
    with pytest.raises(LayoutError, match="factor the dims differently"):
        costs.cost((8, 8, 64), 2, "[(x)(-),-]", "[x,-,-]")
    with pytest.raises(MoveError, match=r"elements of 3 bytes.*1, 2, 4, 8, 16"):
        costs.cost((64, 64), 3, "[x,-]", "[-,-]")
    assert costs.cost((0, 64), 2, "[x,-]", "[-,x]").seconds == synthesize((0, 64), costs.mesh, "[x,-]", "[-,x]").seconds


def test_gradients_are_summed() -> None:
    costs, whole = MoveCosts(Mesh({"x": 8})), 2 * 1024 * 1024
    scatter, reduce = (costs.cost((1024, 1024), 2, "[-,-]+x", dst) for dst in ("[x,-]", "[-,-]"))
    assert scatter.received_nbytes == whole * 7 // 8
    assert reduce.received_nbytes == 2 * scatter.received_nbytes
    assert scatter.seconds < reduce.seconds
    some = {exact: MoveCosts(Mesh({"x": 8}), exact=exact) for exact in (True, False)}
    for exact, itemsize in itertools.product((True, False), (2, 4, 8)):
        scalar = some[exact].cost((), itemsize, "[]+x", "[]")
        assert scalar.seconds == synthesize((), Mesh({"x": 8}), "[]+x", "[]", dtype=DTYPES[itemsize]).seconds


def test_few_syntheses_serve_many_moves() -> None:
    mesh = Mesh({"x": 2, "y": 4})
    costs = MoveCosts(mesh, exact=False)
    every = [
        Layout(dims=tuple(tuple(a for a, p in zip("xy", places, strict=True) if p == d) for d in range(3)))
        for places in itertools.product(range(-1, 3), repeat=2)
    ]
    pairs = [(a, b) for a in every for b in every]
    for rows in (512, 1024, 2048, 4096):
        for a, b in pairs:
            costs.cost((rows, 512, 512), 2, a, b)
    assert costs.syntheses < len(pairs) / 2  # of four times as many questions
    asked = costs.syntheses
    assert costs.cost((512, 512, 512), 2, "[(x)(-),-]", "[(-)(x),-]") == costs.cost((512, 512, 512), 2, "[-,-,x]", "[x,-,-]")
    assert costs.syntheses == asked
    for a, b in pairs:
        costs.cost((1536, 512, 512), 2, a, b)
    assert costs.syntheses - asked < len(pairs) / 20
