"""An unrestricted search over all layouts of a small mesh: the oracle for how few bytes collectives can do with.

Dijkstra over every type on prime sub-axes. Edges: slice, all_gather, all_to_all of one or several minor axes, and
any permute, in any order and any number; no normal form, no levels, no memory cap unless asked for. It is written
apart from scrimp.move and knows it not.
"""

from __future__ import annotations

import heapq
import itertools
from fractions import Fraction
from functools import lru_cache
from math import prod

from scrimp.layout import Layout, Mesh

Type = tuple[tuple[str, ...], ...]


@lru_cache(maxsize=None)
def all_types(mesh: Mesh, rank: int) -> tuple[Type, ...]:
    found = []
    axes = mesh.sub_axes
    for count in range(len(axes) + 1):
        for order in itertools.permutations(axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), rank - 1):
                bounds = (0, *cuts, count)
                found.append(tuple(order[a:b] for a, b in zip(bounds, bounds[1:], strict=False)))
    return tuple(sorted(set(found)))


@lru_cache(maxsize=None)
def least_received(mesh: Mesh, rank: int, src: Layout, capped: bool, dst: Layout | None = None) -> dict[Type, Fraction]:
    """For every type the least that a device receives on the way from src, as a fraction of the whole array."""

    def local(t: Type) -> Fraction:
        return Fraction(1, prod(mesh.axis_size(a) for stack in t for a in stack))

    def counts(t: Type) -> tuple[int, ...]:
        return tuple(prod(mesh.axis_size(a) for a in stack) for stack in t)

    start = src.split(mesh).dims
    cap = max(local(start), local(dst.split(mesh).dims)) if capped and dst is not None else None
    by_counts: dict[tuple[int, ...], list[Type]] = {}
    for t in all_types(mesh, rank):
        by_counts.setdefault(counts(t), []).append(t)
    best: dict[Type, Fraction] = {start: Fraction(0)}
    queue = [(Fraction(0), start)]
    done: set[Type] = set()
    permuted: dict[tuple[int, ...], Fraction] = {}
    while queue:
        price, t = heapq.heappop(queue)
        if t in done:
            continue
        done.add(t)
        used = {a for stack in t for a in stack}
        edges: list[tuple[Fraction, Type]] = []
        for i in range(rank):
            for a in mesh.sub_axes:
                if a not in used:
                    edges.append((Fraction(0), t[:i] + (t[i] + (a,),) + t[i + 1 :]))
            for k in range(1, len(t[i]) + 1):
                block = t[i][-k:]
                m = prod(mesh.axis_size(a) for a in block)
                popped = t[:i] + (t[i][:-k],) + t[i + 1 :]
                edges.append(((m - 1) * local(t), popped))
                for j in range(rank):
                    if j != i:
                        edges.append((Fraction(m - 1, m) * local(t), popped[:j] + (popped[j] + block,) + popped[j + 1 :]))
        if counts(t) not in permuted:  # the first one of a shape reached is the cheapest to permute from
            permuted[counts(t)] = price
            edges += [(local(t), other) for other in by_counts[counts(t)]]
        for extra, other in edges:
            if other in done or (cap is not None and local(other) > cap):
                continue
            if other not in best or price + extra < best[other]:
                best[other] = price + extra
                heapq.heappush(queue, (price + extra, other))
    return best
