"""Raw problems of the planner, as large as the joint graphs of whole models in which no layers repeat.

A node is one operator of a training step. Its options are the layouts of its result on a mesh of 4 x 8: each axis splits a dim
that it divides, or none. The forward is a chain of operators with skip edges. The backward mirrors it, and half of its operators
also read what their forward operators saved. Sizes and operators are drawn anew all along the graph: there is nothing to group.

A pair of layouts is forbidden where both axes would have to move at once, where the slow axis would have to change its dim, or,
on a tied edge (a view, an update in place), where the layouts differ. Sizes that an axis does not divide have fewer layouts.

A choice is planted, operator by operator: cheap, and lean in memory. An edge for which it has no allowed layout is left out. So
the limit, a little above the planted peak, can be met, and the planted seconds are an upper bound on the best.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product

import numpy as np

from scrimp.planner import Edge, Hold, Node, PairHold, Problem, evaluate

AXES = (4, 8)
LINKS = (12e9, 150e9)  # bytes per second along each axis
RATE = 100e9  # bytes of results that a device computes in a second, if nothing is split
LATENCY = 2e-5
SIZES = ((8, 16, 32, 64, 12, 24), (128, 100, 256, 77, 192), (768, 1024, 320, 96, 50, 257, 640))
POINTS_PER_NODE = 0.9  # operators that run at a moment of their own; the others are views
TIED, WEIGHTS, COPIES, SAVED = (
    0.25,
    0.1,
    0.05,
    0.5,
)  # how many edges are tied, nodes have weights, edges hold a copy, results are saved
FULL = 2 << 30  # bytes that a forward saves before its backward begins
MOST_EDGES = 4  # of a node, to later ones
MOST_COPY = 32 << 20
NEAR = 3000  # nodes that a skip edge spans at most
LEAN = 3e-10  # seconds for a byte, to the planted choice
ROOM = 1.02  # the limit over the planted peak

Sizes = tuple[int, ...]
Layout = tuple[int, ...]  # of each axis the dim that it splits, or -1
Map = tuple[int, ...]  # of each dim of what is read the dim of the result, or -1: it is summed over


@dataclass(frozen=True, kw_only=True)
class Planted:
    problem: Problem
    choice: tuple[int, ...]


@cache
def layouts(sizes: Sizes) -> tuple[Layout, ...]:
    found = []
    for layout in product(range(-1, len(sizes)), repeat=len(AXES)):
        parts = [math.prod(n for n, at in zip(AXES, layout, strict=True) if at == dim) for dim in range(len(sizes))]
        if all(size % part == 0 for size, part in zip(sizes, parts, strict=True)):
            found.append(layout)
    return tuple(found)


@cache
def names(sizes: Sizes) -> tuple[str, ...]:
    return tuple("".join("-" if at < 0 else str(at) for at in layout) for layout in layouts(sizes))


@cache
def parts(sizes: Sizes) -> np.ndarray:
    """Of each layout, into how many parts it splits."""
    return np.array([math.prod(n for n, at in zip(AXES, one, strict=True) if at >= 0) for one in layouts(sizes)])


@cache
def moves(source: Sizes, target: Sizes, dims: Map, tied: bool) -> np.ndarray:
    """By pair of layouts: seconds for one byte; infinite if forbidden."""
    table = np.zeros((len(layouts(source)), len(layouts(target))))
    for (i, one), (j, two) in product(enumerate(layouts(source)), enumerate(layouts(target))):
        moved, seconds = 0, 0.0
        for have, want, n, rate in zip(one, two, AXES, LINKS, strict=True):
            image = dims[have] if have >= 0 else -1
            if have >= 0 and image < 0:  # parts of a sum
                seconds += (n - 1) / n / rate * (2 if want < 0 else 1)
                moved += want >= 0
            elif image != want and have >= 0:
                seconds += (n - 1) / n / rate * (1 if want < 0 else 1 / n)
                moved += 2 if want >= 0 and n == AXES[0] else 1
            elif image != want and tied:
                moved += 2
        table[i, j] = math.inf if moved > (0 if tied else 1) else seconds
    return table


class _Graph:
    """Stretches of forward and backward, one after another, as a step over several losses has them. A forward ends when what
    the planted choice saved fills the memory: so there are many points at which bytes are short."""

    def __init__(self, count: int, rng: random.Random) -> None:
        self.rng = rng
        self.sizes: list[Sizes] = []
        self.edges: list[tuple[int, int, Map, bool]] = []
        self.chosen: list[int] = []
        self.seconds: list[np.ndarray] = []
        self.degree = [0] * count
        self.alike: dict[Sizes, list[int]] = {}
        self.begins: list[int] = []  # the first node of every stretch
        while len(self.sizes) < count:
            self.begins.append(len(self.sizes))
            self.stretch(count - len(self.sizes))

    def stretch(self, left: int) -> None:
        rng, start, full = self.rng, len(self.sizes), 0
        inputs: list[Map] = []  # how each operator reads the one before it
        while len(self.sizes) - start < (left + 1) // 2 and full < FULL:
            node = len(self.sizes)
            sizes, dims = self.next_sizes(self.sizes[-1] if node else None)
            inputs.append(dims)
            self.add(sizes, [(node - 1, dims, rng.random() < TIED)] if node else [])
            full += 2 * math.prod(sizes) // int(parts(sizes)[self.chosen[-1]])
        turn = len(self.sizes)
        for mirror in reversed(range(start, min(turn, start + left - (turn - start)))):
            sizes, before = self.sizes[mirror], self.sizes[-1]
            # A gradient's dims come back by the way they went.
            dims = identity(sizes) if mirror == turn - 1 else inverse(inputs[mirror + 1 - start], before)
            saved = [(mirror, identity(sizes), False)] if rng.random() < SAVED or mirror == turn - 1 else []
            self.add(sizes, [(len(self.sizes) - 1, dims, rng.random() < TIED), *saved])

    def next_sizes(self, before: Sizes | None) -> tuple[Sizes, Map]:
        rng = self.rng
        if before is None or rng.random() < 0.01:  # another input, another resolution
            sizes = tuple(rng.choice(some) for some in SIZES)
            return sizes, (-1,) * len(before or ())
        kind = rng.random()
        if kind < 0.55:
            return before, identity(before)
        if kind < 0.65 and len(before) > 1:
            order = list(range(len(before)))
            rng.shuffle(order)
            return tuple(before[order.index(k)] for k in range(len(before))), tuple(order)
        if kind < 0.88:  # a product with a weight: the last dim is summed over, and another comes
            return (*before[:-1], rng.choice(SIZES[2])), (*range(len(before) - 1), -1)
        if kind < 0.94 and len(before) == 3:
            return (before[0], before[2]), (0, -1, 1)
        if len(before) == 2:
            return (before[0], rng.choice(SIZES[1]), before[1]), (0, 2)
        return before, identity(before)

    def add(self, sizes: Sizes, inputs: Sequence[tuple[int, Map, bool]]) -> None:
        rng, node = self.rng, len(self.sizes)
        nbytes = 2 * math.prod(sizes)
        # Split operators run faster, but talk, or work on pieces too small to be quick: some are best left whole.
        luck = np.array([rng.uniform(0.6, 1.7) for _ in layouts(sizes)])
        work, talk = nbytes / RATE * rng.uniform(1, 8), rng.choice([0.0, 0.02, 0.1])
        seconds = LATENCY + work * luck * (1 / parts(sizes) + talk * np.log2(parts(sizes)))
        alike = self.alike.setdefault(sizes, [])
        skips = [j for j in (rng.choice(alike[-40:]) for _ in range(2) if alike) if node - j < NEAR]
        wanted = [*inputs, *((j, identity(sizes), rng.random() < TIED) for j in skips if rng.random() < 0.4)]
        cost = seconds + LEAN * nbytes / parts(sizes)
        taken: set[int] = set()
        for j, dims, tied in wanted:
            if j in taken or self.degree[j] >= MOST_EDGES:
                continue
            table = moves(self.sizes[j], sizes, dims, tied)
            if not np.isfinite(cost + table[self.chosen[j]]).any() or not np.isfinite(table).any():
                table, tied = moves(self.sizes[j], sizes, dims, False), False
            if not np.isfinite(cost + table[self.chosen[j]]).any():
                continue
            taken.add(j)
            cost = cost + table[self.chosen[j]] * 2 * math.prod(self.sizes[j])
            self.edges.append((j, node, dims, tied))
            self.degree[j] += 1
        self.chosen.append(int(np.argmin(cost)))
        self.sizes.append(sizes)
        self.seconds.append(seconds)
        alike.append(node)


def identity(sizes: Sizes) -> Map:
    return tuple(range(len(sizes)))


def inverse(dims: Map, sizes: Sizes) -> Map:
    """From the dims of the result to those of what was read."""
    return tuple(dims.index(k) if k in dims else -1 for k in range(len(sizes)))


def _fill_up(graph: _Graph, at: Sequence[int], last: Sequence[int], points: int) -> np.ndarray:
    """By node, what its bytes are multiplied by: each stretch has a batch with which the planted choice fills the memory."""
    begins = [*graph.begins, len(at)]
    held = np.array([2 * math.prod(sizes) / parts(sizes)[p] for sizes, p in zip(graph.sizes, graph.chosen, strict=True)])
    scale = np.ones(len(at))
    for _ in range(6):
        change = np.bincount(at, held * scale, points + 1) - np.bincount(np.array(last) + 1, held * scale, points + 1)
        profile = np.cumsum(change)[:points]
        for begin, end in pairwise(begins):
            peak = profile[at[begin] : at[end - 1] + 1].max()
            scale[begin:end] *= min(max(FULL / peak, 0.5), 2.0)
    return scale


def raw_problem(count: int, seed: int = 0) -> Planted:
    """`count`: of nodes. The same seed, the same problem."""
    rng = random.Random(seed)
    graph = _Graph(count, rng)
    points = max(int(count * POINTS_PER_NODE), 1)
    at = [min(int(i * POINTS_PER_NODE), points - 1) for i in range(count)]
    last = list(at)
    for one, two, _, _ in graph.edges:
        last[one] = max(last[one], at[two])
    scale = _fill_up(graph, at, last, points)
    nodes, edges = [], []
    for i, sizes in enumerate(graph.sizes):
        nbytes = 2 * math.prod(sizes) * scale[i]
        held = tuple((nbytes // parts(sizes)).astype(int).tolist())
        holds = [Hold(first=at[i], last=last[i], kind="activations", nbytes=held)]
        if rng.random() < WEIGHTS:
            states = 8 * sizes[-1] * rng.choice(SIZES[2])
            holds.append(Hold(first=0, last=points - 1, kind="parameters", nbytes=tuple((states // parts(sizes)).tolist())))
        seconds = tuple(graph.seconds[i].tolist())
        nodes.append(Node(name=f"n{i}", options=names(sizes), seconds=seconds, holds=tuple(holds)))
    for one, two, dims, tied in graph.edges:
        nbytes = 2 * math.prod(graph.sizes[one])
        unit = moves(graph.sizes[one], graph.sizes[two], dims, tied)
        table = np.where(unit > 0, LATENCY + unit * nbytes, 0.0)
        copies: tuple[PairHold, ...] = ()
        if nbytes <= MOST_COPY and rng.random() < COPIES:
            copy = np.where(np.isfinite(unit) & (unit > 0), nbytes // parts(graph.sizes[two]), 0)
            copies = (PairHold(first=at[two], last=at[two], kind="temporaries", nbytes=tuple(map(tuple, copy.tolist()))),)
        edges.append(Edge(nodes=(one, two), seconds=tuple(map(tuple, table.tolist())), holds=copies))
    problem = Problem(points=points, nodes=tuple(nodes), edges=tuple(edges))
    found = evaluate(problem, graph.chosen)
    assert found.seconds < math.inf
    return Planted(problem=replace(problem, limit_nbytes=int(found.peak_nbytes * ROOM)), choice=tuple(graph.chosen))
