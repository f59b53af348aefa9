"""How long the planner's integer program takes, and how near it comes: `python -m bench.solver [--blocks 24] [--gap 0.01]`.

Blocks of operators, all alike, on a mesh of 4 x 8: an operator takes one of 12 ways to split its dims over the two axes; its
time, its parameters with gradients and optimizer states, its saved output and its temporaries shrink by what it splits. Moves
between operators cost what rings take, and a copy. Three forms of one question: every block by itself; blocks in groups of
half the rest each (12, 6, 3, 2, 1 of 24), which choose alike; all alike. Seconds are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.machine import machine
from scrimp.planner import Edge, Hold, Node, PairHold, Problem, Solution, frontier, solve

AXES = (4, 8)
LINKS = (12e9, 150e9)  # bytes per second along each axis
WHOLE, ROWS, COLUMNS, SUM = "-", "rows", "columns", "sum"
# What comes in and what goes out along one axis; a sum goes out where the inner dim is split.
WAYS = ((WHOLE, WHOLE), (ROWS, ROWS), (WHOLE, COLUMNS), (COLUMNS, SUM), (COLUMNS, COLUMNS), (COLUMNS, WHOLE))


def options(count: int) -> list[tuple[tuple[str, str], ...]]:
    """Ways along both axes, those that split most first, of which `count` are kept."""
    both = list(itertools.product(WAYS[: math.ceil(math.sqrt(count))], repeat=len(AXES)))
    return sorted(both, key=lambda ways: -sum(way != WAYS[0] for way in ways))[:count]


def move(out: Sequence[str], into: Sequence[str], nbytes: float) -> tuple[float, int]:
    """Seconds, and the bytes of the copy that it makes."""
    seconds, held = 0.0, nbytes
    for have, want, n, rate in zip(out, into, AXES, LINKS, strict=True):
        part = held / n
        if have in (want, WHOLE):
            held = part if want in (ROWS, COLUMNS) else held
        elif have == SUM:
            seconds += 2e-5 + held * (n - 1) / n / rate * (2 if want == WHOLE else 1)
            held = held if want == WHOLE else part
        elif want == WHOLE:
            seconds += 2e-5 + held * (n - 1) / n / rate
        else:
            seconds += 2e-5 + part * (n - 1) / n / rate
            held = part
    return seconds, 0 if tuple(out) == tuple(into) else int(held)


def groups_of(blocks: int, form: str) -> list[int]:
    """How many blocks choose alike, in order."""
    if form == "each":
        return [1] * blocks
    if form == "alike":
        return [blocks]
    sizes = []
    while blocks:
        sizes.append((blocks + 1) // 2)
        blocks -= sizes[-1]
    return sizes


def blocks_problem(blocks: int, ops: int, count: int, form: str, seed: int = 0) -> Problem:
    """The forward goes over all operators, the backward back; a group's blocks hold as much as they do together, and a copy
    or a temporary is there for one block at a time."""
    rng = random.Random(seed)
    kinds = [(rng.choice([64, 128, 256]) << 20, rng.choice([0, 32, 128]) << 20, rng.uniform(1e-3, 5e-2)) for _ in range(ops)]
    skips = sorted(rng.sample([(i, j) for i in range(ops) for j in range(i + 2, ops)], 3))
    ways = options(count)
    names = tuple(" ".join(f"{into}>{out}" for into, out in way) for way in ways)
    sizes = groups_of(blocks, form)
    total = len(sizes) * ops
    points = 2 * total
    nodes, edges = [], []

    def split(way: tuple[tuple[str, str], ...], of: str) -> int:
        product = 1
        for (into, out), n in zip(way, AXES, strict=True):
            side = out if of == "out" else (COLUMNS if (into, out) in WAYS[2:4] else WHOLE) if of == "weight" else into
            product *= n if side in (ROWS, COLUMNS) else 1
        return product

    def edge(one: int, two: int, times: int, nbytes: int) -> Edge:
        moves = [[move([o for _, o in a], [i for i, _ in b], nbytes) for b in ways] for a in ways]
        seconds = tuple(tuple(2 * times * cost for cost, _ in row) for row in moves)
        copy = tuple(tuple(held for _, held in row) for row in moves)
        here = [PairHold(first=t, last=t, kind="temporaries", nbytes=copy) for t in (two % total, points - 1 - two % total)]
        return Edge(nodes=(one, two), seconds=seconds, holds=tuple(here))

    for g, times in enumerate(sizes):
        for k, (activation, weight, seconds) in enumerate(kinds):
            at = g * ops + k
            saved = tuple(times * activation // split(way, "out") for way in ways)
            states = tuple(times * 7 * weight // split(way, "weight") for way in ways)
            work = tuple(2 * activation // split(way, "out") for way in ways)
            cost = tuple(3 * times * seconds / max(split(way, "out"), split(way, "in")) for way in ways)
            holds = [
                Hold(first=0, last=points - 1, kind="parameters", nbytes=states),
                Hold(first=at, last=points - 1 - at, kind="activations", nbytes=saved),
                *(Hold(first=t, last=t, kind="temporaries", nbytes=work) for t in (at, points - 1 - at)),
            ]
            nodes.append(Node(name=f"g{g}.op{k}", options=names, seconds=cost, holds=tuple(holds)))
            if k:
                edges.append(edge(at - 1, at, times, kinds[k - 1][0]))
            elif g:
                edges.append(edge(at - 1, at, 1, kinds[-1][0]))
        edges += [edge(g * ops + i, g * ops + j, times, kinds[i][0]) for i, j in skips]
        if times > 1:
            edges.append(edge(g * ops + ops - 1, g * ops, times - 1, kinds[-1][0]))
    return Problem(points=points, nodes=tuple(nodes), edges=tuple(edges))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--ops", type=int, default=17)
    parser.add_argument("--options", type=int, default=12)
    parser.add_argument("--gap", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=60.0, help="the most that one solution may take")
    parser.add_argument("--forms", default="each,groups,alike")
    parser.add_argument("--frontier", type=int, default=0, help="points of the frontier of the groups")
    args = parser.parse_args()
    console = Console(width=None if os.isatty(1) else 140, highlight=False)
    console.print({name: text for name, text in machine().items() if name in ("cpu", "cores", "load", "commit")})
    table = Table(
        box=SIMPLE_HEAD, title=f"{args.blocks} blocks x {args.ops} operators x {args.options} options, gap {args.gap:g}"
    )
    for name in (
        "form",
        "question",
        "nodes",
        "edges",
        "variables",
        "rows",
        "entries",
        "CPU s",
        "peak GiB",
        "seconds",
        "gap",
        "status",
        "s/GiB",
    ):
        table.add_column(name, justify="left" if name in ("form", "question", "status") else "right")

    def row(form: str, call: str, problem: Problem, solution: Solution, cpu: float) -> None:
        phase = solution.phases[-1]
        table.add_row(
            form, call, f"{len(problem.nodes)}", f"{len(problem.edges)}", f"{phase.variables:,}", f"{phase.rows:,}",
            f"{phase.entries:,}", f"{cpu:.2f}", f"{solution.peak_nbytes / 2**30:.3f}", f"{solution.seconds:.4f}",
            " ".join(f"{each.gap:.2%}" for each in solution.phases), solution.status, f"{solution.seconds_per_byte * 2**30:.4f}",
        )  # fmt: skip

    for form in args.forms.split(","):
        problem = blocks_problem(args.blocks, args.ops, args.options, form)
        least = 0
        for call, times in (
            ("memory", None),
            ("time", None),
            *((f"time in {times}x", times) for times in (1.05, 1.25, 1.5, 2.0)),
            ("redundancy", None),
        ):
            begin = time.process_time()
            source = problem if times is None else replace(problem, limit_nbytes=int(least * times))
            solution = solve(source, objective=call.split()[0], gap=args.gap, seconds=args.seconds)
            least = least or solution.peak_nbytes
            row(form, call, problem, solution, time.process_time() - begin)
        if args.frontier and form == "groups":
            begin = time.process_time()
            front = frontier(problem, args.frontier, gap=args.gap, seconds=args.seconds * 4)
            for solution in front:
                row(form, "frontier", problem, solution, (time.process_time() - begin) / len(front))
    console.print(table)
