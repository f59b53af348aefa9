"""Programs: bounded, correct, and with no more bytes than an unrestricted search needs."""

from __future__ import annotations

import dataclasses
import random
from fractions import Fraction
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.move.problems import default_order_pairs
from scrimp.cluster import Cluster, Link
from scrimp.errors import LayoutError, MoveError, ScrimpError
from scrimp.layout import Layout, Mesh
from scrimp.move import Program, lower_bound_numel, synthesize
from scrimp.move.simulator import expected, scatter
from tests.support.exhaustive import least_received, state_of
from tests.support.strategies import layouts, meshes, shapes

BYTES_ONLY = Cluster(default=Link(latency_seconds=0.0))
slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def fraction_received(program: Program) -> Fraction:
    return Fraction(program.received_nbytes, program.itemsize * prod(program.shape))


def assert_values(program: Program) -> None:
    array = np.arange(prod(program.shape), dtype=np.int64).reshape(program.shape)
    for rank, (got, want) in enumerate(zip(program.simulate(array), expected(program, array), strict=True)):
        assert np.array_equal(got, want), f"rank {rank} of {program}"


def assert_normal_form(program: Program) -> None:
    kinds = [step.kind for step in program.steps]
    phase = {"slice": 0, "reduce_scatter": 1, "all_reduce": 1, "all_to_all": 2, "permute": 2, "exchange": 2, "all_gather": 3}
    order = [phase.get(kind, 4) for kind in kinds]
    assert order == sorted(order)
    assert kinds.count("permute") + kinds.count("exchange") + kinds.count("direct") <= 1


def test_all_1014_default_order_pairs() -> None:
    """Never above the cap, as few bytes as an unrestricted search, never under the lower bound, values right."""
    problems = default_order_pairs()
    assert len(problems) == 1014
    for problem in problems:
        mesh, src, dst = problem.mesh, Layout.parse(problem.src), Layout.parse(problem.dst)
        program = synthesize(problem.shape, mesh, src, dst, direct=False)
        assert program.peak_numel <= program.cap_numel
        assert "direct" not in [step.kind for step in program.steps]
        least = least_received(mesh, src.rank, state_of(src, mesh))[state_of(dst, mesh)]
        assert fraction_received(program) <= least, str(program)
        bound = lower_bound_numel(problem.shape, mesh, src, dst)
        assert bound <= program.received_nbytes // 4
        loose = synthesize(problem.shape, mesh, src, dst, direct=True)
        assert loose.seconds <= program.seconds
        assert bound <= loose.received_nbytes // 4
        assert loose.peak_numel <= loose.cap_numel
        small = (8,) * src.rank
        for direct in (False, True):
            assert_values(synthesize(small, mesh, src, dst, dtype="int64", direct=direct))
        assert_normal_form(program)


SMALL = [{"x": 8}, {"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 6}, {"x": 3, "y": 2}, {"x": 2, "y": 6}]


@pytest.mark.parametrize("axes", SMALL, ids=str)
def test_any_order_and_partial_sums_need_no_more_bytes_than_an_unrestricted_search(axes: dict[str, int]) -> None:
    mesh = Mesh(axes)
    draw = random.Random(str(axes))
    for _ in range(120):
        rank = draw.choice([1, 2, 2, 3])
        src, dst = random_layout(draw, mesh, rank), random_layout(draw, mesh, rank)
        sums = [axis for axis in mesh.sub_axes if axis not in {a for s in src.split(mesh).dims for a in s}]
        src = dataclasses.replace(src, partial=tuple(axis for axis in sums if draw.random() < 0.4))
        program = synthesize((144,) * rank, mesh, src, dst, cluster=BYTES_ONLY, direct=False)
        least = least_received(mesh, rank, state_of(src, mesh))[state_of(dst, mesh)]
        assert fraction_received(program) <= least, f"{program}: {float(fraction_received(program))} > {float(least)}"
        assert program.peak_numel <= program.cap_numel


def random_layout(draw: random.Random, mesh: Mesh, rank: int) -> Layout:
    names = list(mesh.sub_axes)
    draw.shuffle(names)
    dims: list[list[str]] = [[] for _ in range(rank)]
    for axis in names:
        place = draw.randrange(-1, rank)
        if place >= 0:
            dims[place].append(axis)
    return Layout(dims=tuple(map(tuple, dims)))


@st.composite
def moves(draw: st.DrawFn, *, even: bool = False, partial: bool = True, most: int = 64) -> tuple:
    mesh = draw(meshes(most))
    rank = draw(st.integers(0, 4))
    shape = draw(shapes(mesh, rank, even=even))
    src = draw(layouts(mesh, rank, partial=partial))
    return shape, mesh, src, draw(layouts(mesh, rank))


@slow
@given(moves(), st.booleans())
def test_random_moves_are_bounded_and_right(move: tuple, direct: bool) -> None:
    shape, mesh, src, dst = move
    program = synthesize(shape, mesh, src, dst, dtype="int64", direct=direct)
    assert program.peak_numel <= program.cap_numel
    assert_normal_form(program)
    if prod(shape) * mesh.size <= 20_000:
        assert_values(program)
    if not src.partial:
        assert lower_bound_numel(shape, mesh, src, dst) <= program.received_nbytes // 8


@slow
@given(moves(even=True, partial=False))
def test_never_more_bytes_than_gather_all_then_slice(move: tuple) -> None:
    shape, mesh, src, dst = move
    program = synthesize(shape, mesh, src, dst, cluster=BYTES_ONLY, direct=False)
    naive = prod(shape) - src.local_numel(shape, mesh) if src.split(mesh) != dst.split(mesh) else 0
    assert program.received_nbytes // 4 <= naive


@slow
@given(moves(partial=False, most=24))
def test_there_and_back_is_the_identity(move: tuple) -> None:
    shape, mesh, src, dst = move
    there, back = synthesize(shape, mesh, src, dst, dtype="int64"), synthesize(shape, mesh, dst, src, dtype="int64")
    array = np.arange(prod(shape), dtype=np.int64).reshape(shape)
    middle = there.simulate(array)
    for got, start in zip(middle, scatter(back, array), strict=True):
        assert np.array_equal(got, start)
    for got, start in zip(back.simulate(array), scatter(there, array), strict=True):
        assert np.array_equal(got, start)


@slow
@given(moves())
def test_programs_round_trip_through_json_and_are_deterministic(move: tuple) -> None:
    shape, mesh, src, dst = move
    program = synthesize(shape, mesh, src, dst)
    again = Program.from_json(program.to_json())
    assert again == program
    assert again.hash == program.hash
    from scrimp.move.plan.synthesize import _synthesize

    _synthesize.cache_clear()
    assert synthesize(shape, mesh, str(src), str(dst)).to_json() == program.to_json()


@slow
@given(moves(partial=False), st.booleans())
def test_kept_partial_sums_travel_unsummed(move: tuple, direct: bool) -> None:
    """Every summand is moved for itself; the sum over the ranks that hold a part's summands is the array."""
    shape, mesh, src, dst = move
    free = [a for a in mesh.names if not any(a in s for lay in (src, dst) for s in lay.dims)]
    src, dst = (dataclasses.replace(layout, partial=tuple(free)) for layout in (src, dst))
    program = synthesize(shape, mesh, src, dst, dtype="int64", direct=direct)
    if prod(shape) * mesh.size > 20_000:
        return
    array = np.arange(prod(shape), dtype=np.int64).reshape(shape)
    locals_ = program.simulate(array)
    for rank, want in enumerate(expected(program, array)):
        assert np.array_equal(sum(locals_[other] for other in mesh.group(rank, free)), want)


def test_identity_needs_no_step() -> None:
    mesh = Mesh({"x": 2, "y": 1})
    assert synthesize((4, 4), mesh, "[x,-]", "[x,-]").steps == ()
    assert synthesize((4, 4), mesh, "[x,y]", "[x,-]").steps == ()  # an axis of size 1 splits nothing


def test_the_examples_of_the_facts() -> None:
    mesh = Mesh({"x": 2, "y": 4})
    kinds = {
        ("[x,-]", "[-,x]"): ["all_to_all"],
        ("[x,y]", "[y,x]"): ["all_to_all", "permute"],
        ("[x*y,-]", "[-,x*y]"): ["all_to_all"],
        ("[x*y,-]", "[y*x,-]"): ["permute"],
        ("[y,-]", "[x,-]"): ["permute", "all_gather"],
        ("[x,-]", "[-,y]"): ["slice", "all_gather"],
        ("[y,-]", "[-,x*y]"): ["slice", "all_to_all"],
        ("[-,-]+x", "[-,y]"): ["slice", "all_reduce"],
        ("[-,-]+x+y", "[x,y]"): ["reduce_scatter", "reduce_scatter"],
    }
    for (src, dst), wanted in kinds.items():
        program = synthesize((8192, 8192), mesh, src, dst, direct=False)
        assert [step.kind for step in program.steps] == wanted, str(program)


SLOW = Cluster(default=Link(bytes_per_second=100e9), axes=(("node", Link(bytes_per_second=1e9)),))
FASTER = Cluster(default=Link(bytes_per_second=400e9), axes=(("node", Link(bytes_per_second=50e9)),))


@pytest.mark.parametrize(
    ("axes", "cluster", "src", "dst", "milliseconds"),
    [
        ({"node": 2, "gpu": 8}, SLOW, "[-,-]+gpu+node", "[node*gpu,-]", 19.5),
        ({"node": 2, "gpu": 8}, SLOW, "[node*gpu,-]", "[-,-]", 19.5),
        ({"node": 2, "gpu": 8}, SLOW, "[node,-]", "[-,-]", 19.3),
        ({"node": 4, "gpu": 8}, FASTER, "[-,-]+gpu+node", "[-,-]", 2.3),  # the hierarchical all-reduce
        ({"node": 16, "gpu": 8}, FASTER, "[-,-]+gpu+node", "[-,-]", 3.0),
    ],
)  # fmt: skip
def test_slow_axes_are_spared(axes: dict[str, int], cluster: Cluster, src: str, dst: str, milliseconds: float) -> None:
    """As cheap as the program that a person would write by hand for such a cluster."""
    program = synthesize((8192, 8192), Mesh(axes), src, dst, cluster=cluster)
    assert program.seconds * 1e3 <= milliseconds, str(program)


@pytest.mark.parametrize(
    ("shape", "axes", "src", "dst", "nbytes"),
    [
        ((50264,), {"dp": 2, "tp": 8}, "[-]+dp", "[tp]", 25_136),
        ((5, 1023), {"x": 2, "y": 5}, "[-,-]+x", "[y,-]", 4_096),
        ((400_004,), {"dp": 8, "tp": 4}, "[-]+dp", "[tp]", 700_008),
        ((1, 4 << 20), {"x": 8}, "[-,-]+x", "[x,-]", 30 << 20),
    ],
)  # fmt: skip
def test_sums_of_tiles_that_do_not_divide(shape: tuple, axes: dict[str, int], src: str, dst: str, nbytes: int) -> None:
    """Slices still come before sums, and a scatter over a dim shorter than the axis is priced as what it sends."""
    assert synthesize(shape, Mesh(axes), src, dst).received_nbytes <= nbytes


def test_small_arrays_take_fewer_messages_large_ones_fewer_bytes() -> None:
    mesh = Mesh({"x": 8, "y": 8})
    large = synthesize((8192, 8192), mesh, "[x,y]", "[y,x]")
    small = synthesize((64, 64), mesh, "[x,y]", "[y,x]")
    assert large.received_nbytes / 8192**2 <= small.received_nbytes / 64**2
    assert sum(step.messages for step in small.steps) <= sum(step.messages for step in large.steps)


@pytest.mark.parametrize(
    ("shape", "src", "dst", "kwargs", "error", "words"),
    [
        ((4, 4), "[q,-]", "[-,-]", {}, LayoutError, ["source", "'q'", "x=2"]),
        ((4, 4), "[x,-]", "[-,q]", {}, LayoutError, ["target", "'q'", "x=2"]),
        ((4, 4), "[x,x]", "[-,-]", {}, LayoutError, ["'x'", "twice"]),
        ((4, 4), "[x]", "[-,-]", {}, LayoutError, ["source", "1 dims", "(4, 4)"]),
        ((4, 4), "[x,-]", "[-,-]+y", {}, MoveError, ["['y']", "[x,-]", "[-,-]+y"]),
        ((4, 4), "[x,-]+y", "[-,-]", {"dtype": "float8_e4m3fn"}, MoveError, ["float8_e4m3fn", "wider"]),
        ((4, 4), "[x,-]", "[-,-]", {"dtype": "float13"}, MoveError, ["float13", "bfloat16"]),
        ((3, 4, 4), "[(-)(x),-]", "[-,-,-]", {}, LayoutError, ["[(-)(x),-]", "[-,-,-]", "factor"]),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(
    shape: tuple, src: str, dst: str, kwargs: dict, error: type[ScrimpError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        synthesize(shape, Mesh({"x": 2, "y": 4}), src, dst, **kwargs)
    for word in words:
        assert word in str(caught.value), str(caught.value)
