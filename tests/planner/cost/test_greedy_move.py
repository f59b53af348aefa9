"""What moves cost at most: what a program takes that can be run; for the moves of known parallelisms it is the cheapest."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import combinations, count
from math import inf, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scrimp.cluster import Cluster, Link
from scrimp.layout import Layout, Mesh
from scrimp.move import synthesize
from scrimp.planner.cost.greedy_move import AxisWise

MESH = Mesh({"x": 2, "y": 4})
CLUSTER = Cluster(axes=(("x", Link(latency_seconds=2e-5, bytes_per_second=5e9)),))
SHAPE = (64, 128, 256)


def both(src: str | Layout, dst: str | Layout) -> tuple[float, float]:
    one, other = Layout.parse(src), Layout.parse(dst)
    found = AxisWise(MESH, CLUSTER).seconds(4 * prod(SHAPE), one, other)
    return found, synthesize(SHAPE, MESH, one, other, cluster=CLUSTER).seconds


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("[x,-,-]", "[x,-,-]"),
        ("[-,-,-]", "[-,x,y]"),
        ("[x,y,-]", "[x,-,-]"),
        ("[x,-,y]", "[x,y,-]"),
        ("[x,-,-]+y", "[x,-,-]"),
        ("[x,-,-]+y", "[x,y,-]"),
        ("[y*x,-,-]", "[-,-,-]"),
    ],
)
def test_known_moves_cost_what_they_cost(src: str, dst: str) -> None:
    found, least = both(src, dst)
    assert found == pytest.approx(least, rel=1e-6)


@st.composite
def layouts(draw: st.DrawFn, *, partial: bool) -> Layout:
    dims: list[list[str]] = [[], [], []]
    summed = []
    for axis in draw(st.permutations(MESH.names)):
        where = draw(st.sampled_from([0, 1, 2, None, *(["sum"] if partial else [])]))
        if where == "sum":
            summed.append(axis)
        elif where is not None:
            dims[where].append(axis)
    return Layout(dims=tuple(map(tuple, dims)), partial=tuple(summed))


def cheapest(nbytes: float, src: Layout, dst: Layout) -> float:
    """By a search over all programs of single steps; each step as the docstring of the module says it may be."""
    sizes = dict(MESH.axes)
    start = (src.dims, frozenset(src.partial))
    goal = (dst.dims, frozenset())
    best, queue = {start: 0.0}, [(0.0, 0, start)]
    for number in count(1):
        cost, _, (dims, summed) = heappop(queue)
        if (dims, summed) == goal:
            return cost
        if cost > best[dims, summed]:
            continue
        local = nbytes / prod(sizes[axis] for dim in dims for axis in dim)
        split = {axis for dim in dims for axis in dim}
        found = []
        for k, dim in enumerate(dims):
            for axis in {*sizes} - split:
                price = price_of([axis], local, gather=True) if axis in summed else 0.0
                found.append((price, with_dim(dims, k, (*dim, axis)), summed - {axis}))
            if dim:
                axis = dim[-1]
                price = price_of([axis], local * sizes[axis], gather=True)
                found.append((price, with_dim(dims, k, dim[:-1]), summed))
            for tail in range(1, len(dim) + 1):
                for other in {*range(len(dims))} - {k}:
                    moved = with_dim(with_dim(dims, k, dim[:-tail]), other, (*dims[other], *dim[-tail:]))
                    found.append((price_of(dim[-tail:], local, gather=False), moved, summed))
        for axes in [one for n in (1, 2) for one in combinations(sorted(summed), n)]:
            found.append((2 * price_of(axes, local, gather=True), dims, summed - {*axes}))
        for price, after, rest in found:
            if cost + price < best.get((after, rest), inf):
                best[after, rest] = cost + price
                heappush(queue, (cost + price, number, (after, rest)))
    raise AssertionError


def price_of(axes: Sequence[str], local: float, *, gather: bool) -> float:
    size = prod(dict(MESH.axes)[axis] for axis in axes)
    rounds = sum({"x": 1, "y": 2}[axis] for axis in axes) if gather else size - 1
    return CLUSTER.link(axes).seconds(rounds, local * (size - 1) / size)


def with_dim(dims: tuple[tuple[str, ...], ...], k: int, dim: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    return (*dims[:k], tuple(dim), *dims[k + 1 :])


@given(layouts(partial=True), layouts(partial=False))
@settings(max_examples=200, deadline=None)
def test_a_program_that_can_be_run_and_is_nearly_the_cheapest(src: Layout, dst: Layout) -> None:
    nbytes = 4 * prod(SHAPE)
    found, least = AxisWise(MESH, CLUSTER).seconds(nbytes, src, dst), cheapest(nbytes, src, dst)
    assert least * (1 - 1e-9) <= found <= 4 * least + 1e-12  # where the major axis of a dim goes and the minor one stays
