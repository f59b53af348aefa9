"""An unrestricted search over all layouts of a small mesh: the oracle for how few bytes collectives can do with.

Dijkstra over every type on prime sub-axes. Edges: slice, all_gather, all_to_all and reduce_scatter of one or several
axes, all_reduce, and any permute, in any order and any number: no normal form, no levels, no memory cap. It is written
apart from scrimp.move and does not know it.
"""

from __future__ import annotations

import heapq
import itertools
from fractions import Fraction
from functools import cache
from math import prod

from scrimp.layout import Layout, Mesh

Type = tuple[tuple[str, ...], ...]
State = tuple[Type, frozenset[str]]  # the stacks of axes, and the axes of a partial sum


@cache
def all_types(mesh: Mesh, rank: int) -> tuple[Type, ...]:
    found = set()
    for count in range(len(mesh.sub_axes) + 1):
        for order in itertools.permutations(mesh.sub_axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), rank - 1):
                bounds = (0, *cuts, count)
                found.add(tuple(order[a:b] for a, b in itertools.pairwise(bounds)))
    return tuple(sorted(found))


def state_of(layout: Layout, mesh: Mesh) -> State:
    split = layout.split(mesh)
    return split.dims, frozenset(split.partial)


@cache
def least_received(mesh: Mesh, rank: int, start: State) -> dict[State, Fraction]:
    """For every state the least that a device receives on the way from `start`, as a fraction of the whole array."""

    def size(axes: tuple[str, ...]) -> int:
        return prod(mesh.axis_size(axis) for axis in axes)

    def local(dims: Type) -> Fraction:
        return Fraction(1, prod(size(stack) for stack in dims))

    def counts(dims: Type) -> tuple[int, ...]:
        return tuple(size(stack) for stack in dims)

    by_counts: dict[tuple[int, ...], list[Type]] = {}
    for dims in all_types(mesh, rank):
        by_counts.setdefault(counts(dims), []).append(dims)

    def edges(dims: Type, partial: frozenset[str]) -> list[tuple[Fraction, State]]:
        used = {axis for stack in dims for axis in stack} | partial
        out: list[tuple[Fraction, State]] = []

        def pushed(on: Type, dim: int, axes: tuple[str, ...]) -> Type:
            return on[:dim] + (on[dim] + axes,) + on[dim + 1 :]

        for dim in range(rank):
            out += [(Fraction(0), (pushed(dims, dim, (a,)), partial)) for a in mesh.sub_axes if a not in used]
            for k in range(1, len(partial) + 1):
                for axes in itertools.permutations(sorted(partial), k):
                    m = size(axes)
                    out.append((Fraction(m - 1, m) * local(dims), (pushed(dims, dim, axes), partial - {*axes})))
            for k in range(1, len(dims[dim]) + 1):
                block = dims[dim][-k:]
                m = size(block)
                popped = dims[:dim] + (dims[dim][:-k],) + dims[dim + 1 :]
                out.append(((m - 1) * local(dims), (popped, partial)))
                out += [
                    (Fraction(m - 1, m) * local(dims), (pushed(popped, to_dim, block), partial))
                    for to_dim in range(rank)
                    if to_dim != dim
                ]
        for axis in partial:
            m = mesh.axis_size(axis)
            out.append((2 * Fraction(m - 1, m) * local(dims), (dims, partial - {axis})))
        return out

    best: dict[State, Fraction] = {start: Fraction(0)}
    queue = [(Fraction(0), start[0], sorted(start[1]))]
    done: set[State] = set()
    permuted: set[object] = set()
    while queue:
        price, dims, names = heapq.heappop(queue)
        partial = frozenset(names)
        if (dims, partial) in done:
            continue
        done.add((dims, partial))
        steps = edges(dims, partial)
        if (counts(dims), partial) not in permuted:  # the first of a shape to be reached is the cheapest to permute from
            permuted.add((counts(dims), partial))
            alike = (other for other in by_counts[counts(dims)] if not partial & {a for stack in other for a in stack})
            steps += [(local(dims), (other, partial)) for other in alike]
        for extra, state in steps:
            if state not in done and price + extra < best.get(state, Fraction(10**9)):
                best[state] = price + extra
                heapq.heappush(queue, (price + extra, state[0], sorted(state[1])))
    return best
