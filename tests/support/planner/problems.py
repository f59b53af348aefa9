"""Problems of the planner to test with, and their answers by trying every choice."""

from __future__ import annotations

import itertools
import math
import random

from scrimp.planner import Edge, Hold, Node, PairHold, Problem

KINDS = ("parameters", "activations", "temporaries")


def random_problem(
    seed: int, *, nodes: tuple[int, int] = (2, 6), options: int = 4, forbid: float = 0.1, nbytes: int = 100, constant: int = 0
) -> Problem:
    """`forbid`: how many of the costs are infinite; `nbytes`: the most of a hold; `constant`: bytes that are always there."""
    rng = random.Random(seed)
    count, points = rng.randint(*nodes), rng.randint(1, 8)
    sizes = [rng.randint(2, options) for _ in range(count)]

    def seconds() -> float:
        return math.inf if rng.random() < forbid else rng.choice([0.0, rng.uniform(1e-6, 1e-3), rng.randint(1, 5) * 1e-4])

    def span() -> tuple[int, int]:
        first = rng.randrange(points)
        return first, rng.randrange(first, points)

    def row(size: int) -> tuple[float, ...]:
        drawn = [seconds() for _ in range(size)]
        drawn[rng.randrange(size)] = rng.uniform(0, 1e-3)
        return tuple(drawn)

    def some(size: int) -> tuple[int, ...]:
        return tuple(constant + rng.choice([0, rng.randint(0, nbytes), rng.randint(1, 4) * (nbytes // 4)]) for _ in range(size))

    made = []
    for i, size in enumerate(sizes):
        holds = [(span(), rng.choice(KINDS), some(size)) for _ in range(rng.randint(0, 3))]
        made.append(
            Node(
                name=f"n{i}",
                options=tuple(f"o{p}" for p in range(size)),
                seconds=row(size),
                holds=tuple(Hold(first=first, last=last, kind=kind, nbytes=table) for (first, last), kind, table in holds),
            )
        )
    edges = []
    for one, two in itertools.permutations(range(count), 2):
        if rng.random() < 0.35:
            # Rows are drawn from few, as those of real tables are.
            rows = [row(sizes[two]) for _ in range(rng.randint(1, sizes[one]))]
            table = tuple(rng.choice(rows) for _ in range(sizes[one]))
            pairs = []
            for _ in range(rng.randint(0, 2)):
                held = [some(sizes[two]) for _ in range(2)]
                first, last = span()
                nbytes_of = tuple(rng.choice(held) for _ in range(sizes[one]))
                pairs.append(PairHold(first=first, last=last, kind=rng.choice(KINDS), nbytes=nbytes_of))
            edges.append(Edge(nodes=(one, two), seconds=table, holds=tuple(pairs)))
    return Problem(points=points, nodes=tuple(made), edges=tuple(edges))


def naive(problem: Problem, choice: tuple[int, ...]) -> tuple[int, int, float]:
    """Peak, held bytes and seconds, point by point."""
    tables = [
        (hold.first, hold.last, hold.nbytes[p]) for node, p in zip(problem.nodes, choice, strict=True) for hold in node.holds
    ]
    costs = [node.seconds[p] for node, p in zip(problem.nodes, choice, strict=True)]
    for edge in problem.edges:
        one, two = (choice[i] for i in edge.nodes)
        costs.append(edge.seconds[one][two])
        tables += [(hold.first, hold.last, hold.nbytes[one][two]) for hold in edge.holds]
    peaks = [sum(nbytes for first, last, nbytes in tables if first <= t <= last) for t in range(problem.points)]
    return max(peaks), sum(nbytes for _, _, nbytes in tables), math.fsum(costs)


def every_choice(problem: Problem) -> list[tuple[int, int, float]]:
    """Of all that are allowed."""
    choices = itertools.product(*(range(len(node.options)) for node in problem.nodes))
    return [found for found in (naive(problem, choice) for choice in choices) if found[2] < math.inf]
