"""Moves by scrimp, DTensor's two planners, the naive way and XLA, all in one run: `python -m bench.move`.

Four parts: counts (bytes and logical peaks), planning time, wall time on 8 gloo processes, and real allocation there.
Then a verdict on each figure that scrimp set itself. Ends with 1 if a value was wrong or a memory bound broken;
times are figures of this machine and fail nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.machine import machine
from bench.move import counts as mc
from bench.move.counts import COLLECTIVES, DEFAULT, DIRECT, MIN_COST, XLA, Row, Tick, geomean, summary
from bench.move.problems import PAIR_SETS, TABLE, default_order_pairs
from scrimp.ext.ranks import RankPool

WIDTH = 140  # of tables in a file
MIB = 1 << 20
WORLD = 8
JOB_SECONDS = 600.0
PARTS = ("counts", "planning", "wall", "allocation")
QUICK_ALLOCATION = ("A1", "A3", "A7", "A10", "B6", "C1")
PEERS_OVER_BOUND = {DEFAULT: 500, MIN_COST: 224, XLA: 116}  # of the 1,014 pairs, as found with torch 2.13 and jax 0.10.2

Results = dict[str, Any]


class Report:
    """Tables on stdout, what is being done on stderr, and the verdict as it grows."""

    def __init__(self) -> None:
        self.out = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
        self.err = Console(stderr=True, highlight=False)
        self.verdict: list[Results] = []
        self.failed = False

    @contextmanager
    def part(self, name: str) -> Iterator[Tick]:
        start = time.perf_counter()
        if self.err.is_terminal:
            with self.err.status(name) as status:
                yield lambda text: status.update(f"{text} ({time.perf_counter() - start:.0f} s)")
        else:
            yield lambda text: None
        self.err.print(f"{name}: {time.perf_counter() - start:.0f} s")

    def say(self, text: str, style: str | None = None) -> None:
        self.out.print(text + "\n", style=style, markup=False)

    def table(self, title: str, columns: str, rows: Sequence[Sequence[object]], *, totals: int = 0) -> None:
        """`columns` are parted by |, and start with < where words stand in them; `totals` rows at the end are set off."""
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="none")
        for column in columns.split("|"):
            name = column.removeprefix("<")
            # Two lines of heading, so that columns are no wider than their figures.
            table.add_column(name.replace(" ", "\n", 1), justify="right" if name == column else "left", no_wrap=True)
        for number, row in enumerate(rows, start=1):
            if totals and number == len(rows) - totals + 1:
                table.add_row()
            table.add_row(*(Text(str(cell)) for cell in row))  # as text, for layouts look like markup
        self.out.print(title, style="bold", markup=False)
        self.out.print(table)

    def judge(self, target: str, figure: str, reached: bool, *, must: bool = False) -> None:
        """`must`: a miss makes the run fail."""
        self.verdict.append({"target": target, "figure": figure, "reached": reached})
        self.failed |= must and not reached


# Bytes and peaks.


def counts_part(report: Report, quick: bool) -> Results:
    pairs = default_order_pairs()
    with report.part("counts") as tick:
        rows, note = mc.count([*TABLE, *pairs], TABLE if quick else [*TABLE, *pairs], tick)
    note = note or ("--quick: XLA compiles the 28 problems alone, not the 1,014 pairs" if quick else "")
    table, rest = rows[: len(TABLE)], rows[len(TABLE) :]
    sets = {name: [row for row in rest if row.problem.id.startswith(f"{name}:")] for name in PAIR_SETS} | {"all": rest}
    for path, names in (("peers as on NCCL", mc.NCCL_PATH), ("peers as on gloo, without all-to-all", mc.GLOO_PATH)):
        _print_problems(report, table, path, [name for name in names if name in table[0].counts])
        _print_sets(report, sets, path, names)
    bounds = {name: {who: mc.against_bound(of, who) for who in (COLLECTIVES, DIRECT)} for name, of in sets.items()}
    report.table(
        "scrimp against the least bytes that any protocol could receive",
        "<set|<contender|compared|at the least|geomean|worst|over max(in, out)",
        [
            [name, who, b["compared"], b["equal"], f"{b['geomean']:.3f}", f"{b['worst']:.2f}", b["over_bound"]]
            for name, of in bounds.items()
            for who, b in of.items()
        ],
    )
    if note:
        report.say(note, "yellow")
    _judge_counts(report, rows, rest)
    return {
        "problems": [{"id": row.problem.id, "least_nbytes": row.bound_nbytes, "counts": row.counts} for row in rows],
        "sets": {name: {who: summary(of, who) for who in (DIRECT, *mc.PEERS)} for name, of in sets.items()},
        "against_least": bounds,
        "note": note,
    }


def _print_problems(report: Report, table: list[Row], path: str, names: list[str]) -> None:
    cells: list[list[object]] = []
    for row in table:
        ours = row.counts[COLLECTIVES]
        cell: list[object] = [row.problem.id, f"{row.problem.src} -> {row.problem.dst}", f"{ours.nbytes / MIB:.0f}"]
        cell += [f"{ours.nbytes / row.bound_nbytes:.2f}", f"{ours.peak:g}"]
        cells.append(cell + [f"{row.counts[who].nbytes / ours.nbytes:.2f} / {row.counts[who].peak:g}" for who in names])
    sums = [s for s in (summary(table, name) for name in names) if s]
    over = sum(row.counts[COLLECTIVES].peak > 1 for row in table)
    cells.append(["", "geomean", "", "", "", *(f"{s['geomean']:.2f}" for s in sums)])
    cells.append(["", "over max(in, out)", "", "", over, *(s["over_bound"] for s in sums)])
    title = f"28 problems, {path}: bytes received over those of scrimp's collectives / peak over max(in, out)"
    report.table(title, "|".join(["<", "<problem", "scrimp MiB", "over the least", "peak", *names]), cells, totals=2)


def _print_sets(report: Report, sets: dict[str, list[Row]], path: str, names: Sequence[str]) -> None:
    cells = []
    for name, rows in sets.items():
        for who in names:
            if s := summary(rows, who):
                nothing = f"{s['scrimp_receives_nothing']} ({s['only_peer_receives']})"
                figures = f"{s['geomean']:.3f}", f"{s['worst']:.2f}", s["over_bound"], s["fewer_than_scrimp"]
                cells.append([name, who, s["pairs"], s["compared"], nothing, *figures])
    report.table(
        f"all ordered pairs of default-order layouts, {path}: bytes received over those of scrimp's collectives",
        "<set|<contender|pairs|compared|scrimp gets 0 (peer not)|geomean|worst|over max(in, out)|fewer than scrimp",
        cells,
    )


def _judge_counts(report: Report, rows: list[Row], pairs: list[Row]) -> None:
    sums = {who: s for who in mc.PEERS if (s := summary(pairs, who))}
    for who, s in sums.items():
        fewer = s["fewer_than_scrimp"]
        report.judge(f"collectives receive no more than {who} on every pair", f"more on {fewer} of {s['pairs']}", fewer == 0)
    for who, least in ((DEFAULT, 1.7), (MIN_COST, 1.3), (XLA, 1.25)):
        if who in sums:
            figure = sums[who]["geomean"]
            report.judge(f"{who} receives at least {least}x the bytes (geomean)", f"{figure:.3f}x", figure >= least)
    for who in (COLLECTIVES, DIRECT):
        over = sum(row.counts[who].peak > 1 for row in rows)
        report.judge(f"{who} never above max(in, out)", f"above on {over} of {len(rows)}", over == 0, must=True)
    for who, known in PEERS_OVER_BOUND.items():
        if who in sums:
            over = sums[who]["over_bound"]
            report.judge(f"{who} above max(in, out) on {known} pairs, as known", f"above on {over}", over == known)


# Planning time.


def planning_part(report: Report, quick: bool) -> Results:
    with report.part("planning") as tick:
        rows = mc.planning(20 if quick else 100, tick)
    cells = []
    for row in rows:
        cached = f"{row['cached'] * 1e6:.1f}" if row["cached"] is not None else ""
        cells.append(
            [row["mesh"], row["planner"], row["pairs"], *(f"{row[k] * 1e3:.2f}" for k in ("median", "p90", "max")), cached]
        )
    title = (
        f"planning, cold, CPU time: random pairs of layouts of {list(mc.PLANNED_SHAPE)}; DTensor default: with axes in mesh order"
    )
    report.table(title, "<mesh|<planner|pairs|median ms|p90 ms|max ms|cached us", cells)
    for who in (COLLECTIVES, DIRECT):
        ours = [row for row in rows if row["planner"] == who]
        small = max(row["median"] for row in ours if row["mesh"] == str(mc.SMALL))
        large = max(row["median"] for row in ours if row["mesh"] != str(mc.SMALL))
        cached = max(row["cached"] for row in ours)
        report.judge(f"{who} plans 2x2x2x2, rank 4, in under 5 ms (median)", f"{small * 1e3:.2f} ms", small < 5e-3)
        report.judge(f"{who} plans 512 devices, rank 4, in under 50 ms (median)", f"{large * 1e3:.2f} ms", large < 50e-3)
        report.judge(f"{who} answers from its cache in under 50 us", f"{cached * 1e6:.1f} us", cached < 50e-6)
    return {"rows": rows}


# Wall time and allocation, on ranks.


def wall_part(report: Report, pool: RankPool, nbytes: int, repeats: int) -> Results:
    from bench.move import ranks as mr

    rows: list[Results] = []
    wrong = []
    with report.part("wall") as tick:
        for problem in (mr.with_global_size(p, nbytes) for p in mr.problems()):
            tick(f"wall time of {problem.id}")
            answers = pool.run("bench.move.ranks:wall", problem, repeats)
            wrong += [(problem.id, who, rank) for rank, answer in enumerate(answers) for who in answer["wrong"]]
            # A move lasts until its last rank is done.
            each = {who: [max(t) for t in zip(*(a["seconds"][who] for a in answers), strict=True)] for who in mr.CONTENDERS}
            rows.append({"id": problem.id, "shape": problem.shape, "same": mr.same_program(problem), "seconds": each})
    median = [{who: statistics.median(seconds) for who, seconds in row["seconds"].items()} for row in rows]
    faster = {(peer, who): [m[peer] / m[who] for m in median] for peer in mr.CONTENDERS[2:] for who in (COLLECTIVES, DIRECT)}
    shown = [faster[DEFAULT, who] for who in (COLLECTIVES, DIRECT)]

    def ms(row: Results, who: str, seconds: float) -> str:
        return f"{seconds * 1e3:.0f}" + ("=" if who == DIRECT and row["same"] else " " if who == DIRECT else "")

    cells: list[list[object]] = [
        [row["id"], *(ms(row, who, m[who]) for who in mr.CONTENDERS), *(f"{ratios[k]:.2f}" for ratios in shown)]
        for k, (row, m) in enumerate(zip(rows, median, strict=True))
    ]
    blank = [""] * len(mr.CONTENDERS)
    for name, function in (("geomean", geomean), ("least", min), ("most", max)):
        cells.append([name, *blank, *(f"{function(ratios):.2f}" for ratios in shown)])
    title = f"wall ms on {WORLD} gloo ranks, {nbytes // MIB} MiB float32, median of {repeats}; last: DTensor default over scrimp"
    report.table(title, "|".join(["<", *mr.CONTENDERS, "default /scrimp", "default /direct"]), cells, totals=3)
    report.say(f"= the same program as without direct exchange, on {sum(row['same'] for row in rows)} of {len(rows)}")
    report.say("; ".join(f"{peer} over {who}: {geomean(ratios):.2f}x" for (peer, who), ratios in faster.items()) + " (geomeans)")
    for problem_id, who, rank in wrong:
        report.say(f"WRONG VALUES: {who} on {problem_id}, rank {rank}", "bold white on red")
    ranks = WORLD * len(rows) * len(mr.CONTENDERS)
    report.judge("every value equals the oracle", f"{len(wrong)} wrong of {ranks} tiles", not wrong, must=True)
    for who in (COLLECTIVES, DIRECT):
        figure = geomean(faster[DEFAULT, who])
        report.judge(f"{who} at least 1.5x faster than DTensor default (geomean)", f"{figure:.2f}x", figure >= 1.5)
    geomeans = {f"{peer} / {who}": geomean(ratios) for (peer, who), ratios in faster.items()}
    return {"nbytes": nbytes, "rows": rows, "geomeans": geomeans, "wrong": wrong}


def allocation_part(report: Report, pool: RankPool, quick: bool) -> Results:
    from bench.move import ranks as mr

    names = (*mr.CONTENDERS, *mr.DONATED)
    asked = [mr.with_local_size(p, mr.LOCAL_NBYTES) for p in mr.problems() if not quick or p.id in QUICK_ALLOCATION]
    rows: list[Results] = []
    cells, broken = [], []
    with report.part("allocation") as tick:
        for problem in asked:
            tick(f"allocation of {problem.id}")
            answers = pool.run("bench.move.ranks:allocation", problem)
            ends = mr.local_nbytes(problem)
            promised = {who: mr.promised_nbytes(problem, donated=who in mr.DONATED) for who in (COLLECTIVES, DIRECT, *mr.DONATED)}
            most = {who: max(answer[who] for answer in answers) for who in promised}  # the promise holds on every rank
            broken += [(problem.id, who, most[who], limit) for who, limit in promised.items() if most[who] > limit]
            over_ends = {who: answers[0][who] / sum(ends) for who in names}
            share = {who: f" {most[who] / promised[who]:4.0%}" if who in promised else "" for who in names}
            cells.append(
                [problem.id, *(f"{end / MIB:.0f}" for end in ends), *(f"{over_ends[who]:.2f}{share[who]}" for who in names)]
            )
            rows.append({"id": problem.id, "shape": problem.shape, "ends": ends, "promised": promised, "peaks": answers})
            rows[-1]["over_ends"] = over_ends
    means = {who: geomean(row["over_ends"][who] for row in rows) for who in names}
    cells.append(["geomean", "", "", *(f"{means[who]:.2f}{'':5}" if who in promised else f"{means[who]:.2f}" for who in names)])
    title = (
        "most bytes live in torch's allocator on rank 0, over in + out; for scrimp, the share of its promise on the worst rank"
    )
    report.table(title, "|".join(["<", "in MiB", "out MiB", *names]), cells, totals=1)
    for problem_id, who, held, limit in broken:
        report.say(f"PROMISE BROKEN: {who} on {problem_id} held {held / MIB:.1f} of {limit / MIB:.1f} MiB", "bold white on red")
    report.judge("scrimp allocates no more than it promises", f"more in {len(broken)} of {4 * len(rows)}", not broken, must=True)
    return {"rows": rows, "geomeans": means, "broken": broken}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.move", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller arrays, fewer repeats, XLA on the 28 problems alone")
    parser.add_argument("--repeats", type=int, help="timed moves of each contender (5; quick 3)")
    parser.add_argument("--part", choices=PARTS, help="this part alone")
    parser.add_argument("--json", metavar="FILE", help="write all numbers")
    options = parser.parse_args()
    quick, parts = options.quick, (options.part,) if options.part else PARTS
    repeats = options.repeats or (3 if quick else 5)

    report = Report()
    results: Results = {"machine": machine(), "quick": quick, "repeats": repeats}
    report.say("\n".join(f"{name:8}{value}" for name, value in results["machine"].items()))
    if "counts" in parts:
        results["counts"] = counts_part(report, quick)
    if "planning" in parts:
        results["planning"] = planning_part(report, quick)
    if "wall" in parts or "allocation" in parts:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler of every rank tells of its stages
        with RankPool(WORLD, timeout_seconds=JOB_SECONDS) as pool:
            if "wall" in parts:
                results["wall"] = wall_part(report, pool, (8 if quick else 64) * MIB, repeats)
            if "allocation" in parts:
                results["allocation"] = allocation_part(report, pool, quick)
    words = {True: "reached", False: "MISSED"}
    report.table("verdict", "<target|<figure|<", [[v["target"], v["figure"], words[v["reached"]]] for v in report.verdict])
    results["verdict"] = report.verdict
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    return int(report.failed)
