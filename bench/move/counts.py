"""What can be said about moves without running them: bytes, logical peaks, and the time that planning takes.

Bytes are those the busiest device receives, summed over the steps; the peak is the largest local array before, between
and after the steps, over the larger of source and target tile: above 1 the memory bound is broken. All contenders are
counted by one model, and the peers' plans are read from the peers in every run.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import exp, log
from typing import Any, NamedTuple
from unittest.mock import patch

from bench.move.problems import MoveProblem
from bench.move.xla_plans import xla_plans
from scrimp.errors import ScrimpError
from scrimp.ext import dtensor_plans
from scrimp.ext.dtensor_plans import PeerPlan, dtensor_plan, fake_world, naive_plan
from scrimp.layout import Layout, Mesh
from scrimp.move import Program, clear_program_cache, lower_bound_numel, synthesize

ITEMSIZE = 4  # float32
COLLECTIVES, DIRECT = "scrimp", "scrimp direct"
DEFAULT, MIN_COST, NAIVE, XLA = "DTensor default", "DTensor min-cost", "naive", "XLA"
DEFAULT_GLOO, MIN_COST_GLOO = "DTensor default gloo", "DTensor min-cost gloo"
NCCL_PATH = (DIRECT, DEFAULT, MIN_COST, NAIVE, XLA)
GLOO_PATH = (DEFAULT_GLOO, MIN_COST_GLOO, NAIVE)
PEERS = (DEFAULT, MIN_COST, NAIVE, XLA, DEFAULT_GLOO, MIN_COST_GLOO)

Tick = Callable[[str], None]  # told what is being done


class Count(NamedTuple):
    nbytes: int
    peak: float


class Row(NamedTuple):
    """One problem: the least any protocol could receive, and what each contender does."""

    problem: MoveProblem
    bound_nbytes: int
    counts: dict[str, Count]


def count(problems: Sequence[MoveProblem], for_xla: Sequence[MoveProblem], tick: Tick) -> tuple[list[Row], str]:
    """A row for each problem, and why XLA is missing, if it is. XLA compiles beside us, in a process of its own."""
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(xla_plans, [(p.shape, p.mesh, p.src, p.dst) for p in for_xla])
        rows = []
        with fake_world(max(p.mesh.size for p in problems)):
            for number, problem in enumerate(problems, start=1):
                if number % 20 == 1:
                    tick(f"counting bytes and peaks, problem {number} of {len(problems)}")
                rows.append(_row(problem))
        tick(f"XLA compiles {len(for_xla)} problems")
        plans, missing = _xla_answer(asked)
    for problem, plan in zip(for_xla, plans, strict=bool(plans)):
        rows[problems.index(problem)].counts[XLA] = _of_plan(problem, plan)
    return rows, missing


def _xla_answer(asked: Future[list[PeerPlan] | None]) -> tuple[list[PeerPlan], str]:
    try:
        plans = asked.result()
    except ScrimpError as error:
        return [], f"XLA is left out: {error}"
    return plans or [], "" if plans else "XLA is left out: jax is not installed (pip install 'scrimp[bench]')"


def _row(problem: MoveProblem) -> Row:
    _, mesh, shape, src, dst = problem
    counts = {name: _of_program(synthesize(shape, mesh, src, dst, direct=name == DIRECT)) for name in (COLLECTIVES, DIRECT)}
    for name, gloo_name, min_cost in ((DEFAULT, DEFAULT_GLOO, False), (MIN_COST, MIN_COST_GLOO, True)):
        counts[name] = _of_plan(problem, dtensor_plan(shape, mesh, src, dst, min_cost=min_cost))
        counts[gloo_name] = _of_plan(problem, dtensor_plan(shape, mesh, src, dst, min_cost=min_cost, path="gloo"))
    counts[NAIVE] = _of_plan(problem, naive_plan(shape, mesh, src, dst))
    return Row(problem, lower_bound_numel(shape, mesh, src, dst) * ITEMSIZE, counts)


def _of_program(program: Program) -> Count:
    return Count(program.received_nbytes, program.peak_numel / program.cap_numel)


def _of_plan(problem: MoveProblem, plan: PeerPlan) -> Count:
    cap = max(Layout.parse(end).local_numel(problem.shape, problem.mesh) for end in (problem.src, problem.dst))
    return Count(plan.received_numel * ITEMSIZE, plan.peak_numel / cap)


def geomean(values: Iterable[float]) -> float:
    logs = [log(value) for value in values]
    return exp(sum(logs) / len(logs)) if logs else float("nan")


def summary(rows: Sequence[Row], name: str) -> dict[str, Any] | None:
    """A contender against scrimp's collectives over many problems; None where it was not counted on all of them."""
    if not rows or any(name not in row.counts for row in rows):
        return None
    ours, theirs = ([row.counts[who].nbytes for row in rows] for who in (COLLECTIVES, name))
    ratios = [b / a for a, b in zip(ours, theirs, strict=True) if a and b]
    return {
        "pairs": len(rows),
        "compared": len(ratios),
        "scrimp_receives_nothing": ours.count(0),
        "only_peer_receives": sum(b > 0 for a, b in zip(ours, theirs, strict=True) if not a),
        "geomean": geomean(ratios),
        "worst": max(ratios, default=float("nan")),
        "over_bound": sum(row.counts[name].peak > 1 for row in rows),
        "fewer_than_scrimp": sum(b < a for a, b in zip(ours, theirs, strict=True)),
    }


def against_bound(rows: Sequence[Row], name: str) -> dict[str, Any]:
    """Scrimp against the least that any protocol could receive."""
    ratios = [row.counts[name].nbytes / row.bound_nbytes for row in rows if row.bound_nbytes]
    return {
        "compared": len(ratios),
        "equal": sum(ratio == 1 for ratio in ratios),
        "geomean": geomean(ratios),
        "worst": max(ratios),
        "below": sum(row.counts[name].nbytes < row.bound_nbytes for row in rows),  # would be a fault of the count
        "over_bound": sum(row.counts[name].peak > 1 for row in rows),
    }


# Planning time, as CPU time of the thread that plans: others on the machine are not part of the figure.

SMALL = Mesh({"a": 2, "b": 2, "c": 2, "d": 2})
PLANNED = (SMALL, Mesh({"a": 8, "b": 8, "c": 8}), Mesh({"a": 2, "b": 2, "c": 8, "d": 16}))
PLANNED_SHAPE = (512,) * 4
SLOW_SAMPLE = 5  # of DTensor's min-cost planner, which takes most of a second for a pair of 4 axes
CACHED_CALLS = 200

Pair = tuple[Layout, Layout]


def planning(pairs: int, tick: Tick) -> list[dict[str, Any]]:
    """Rows of mesh, planner, and seconds: median, p90 and max over pairs, and per call once it is cached."""
    rows = []
    for mesh in PLANNED:
        drawn = random_pairs(mesh, len(PLANNED_SHAPE), pairs)
        for name, direct in ((COLLECTIVES, False), (DIRECT, True)):
            tick(f"planning time of {name} on {mesh}")
            cached = [_cached_seconds(mesh, pair, direct) for pair in drawn[: pairs // 5]]
            rows.append(_times(mesh, name, [_cold_seconds(mesh, pair, direct) for pair in drawn]))
            rows[-1]["cached"] = statistics.median(cached)
        # The default planner knows the mesh's axis order alone: the same pairs with their axes sorted.
        ordered = [(a, b) for a, b in ((_ordered(src, mesh), _ordered(dst, mesh)) for src, dst in drawn) if a != b]
        for name, min_cost, asked in ((DEFAULT, False, ordered), (MIN_COST, True, drawn[:SLOW_SAMPLE])):
            tick(f"planning time of {name} on {mesh}")
            rows.append(_times(mesh, name, _dtensor_seconds(mesh, asked, min_cost)))
    return rows


def random_pairs(mesh: Mesh, rank: int, pairs: int) -> list[Pair]:
    """Every axis splits a random dim with probability 0.8, in random order, and holds replicas else."""
    rng = random.Random(0)

    def layout() -> Layout:
        dims: list[tuple[str, ...]] = [()] * rank
        for axis in rng.sample(mesh.names, len(mesh.names)):
            if rng.random() < 0.8:
                dims[rng.randrange(rank)] += (axis,)
        return Layout(dims=tuple(dims))

    found: list[Pair] = []
    while len(found) < pairs:
        pair = layout(), layout()
        found += [pair] if pair[0] != pair[1] else []
    return found


def _ordered(layout: Layout, mesh: Mesh) -> Layout:
    return Layout(dims=tuple(tuple(sorted(axes, key=mesh.names.index)) for axes in layout.dims))


def _times(mesh: Mesh, name: str, seconds: list[float]) -> dict[str, Any]:
    p90 = statistics.quantiles(seconds, n=10, method="inclusive")[-1]
    times = {"median": statistics.median(seconds), "p90": p90, "max": max(seconds)}
    return {"mesh": str(mesh), "planner": name, "pairs": len(seconds), **times, "cached": None}


def _cold_seconds(mesh: Mesh, pair: Pair, direct: bool) -> float:
    clear_program_cache()
    start = time.thread_time()
    synthesize(PLANNED_SHAPE, mesh, *pair, direct=direct)
    return time.thread_time() - start


def _cached_seconds(mesh: Mesh, pair: Pair, direct: bool) -> float:
    src, dst = map(str, pair)
    synthesize(PLANNED_SHAPE, mesh, src, dst, direct=direct)
    start = time.thread_time()
    for _ in range(CACHED_CALLS):
        synthesize(PLANNED_SHAPE, mesh, src, dst, direct=direct)
    return (time.thread_time() - start) / CACHED_CALLS


def _dtensor_seconds(mesh: Mesh, pairs: Sequence[Pair], min_cost: bool) -> list[float]:
    """Of the planner alone: what it is given is made beforehand, and its caches are cleared for each pair."""
    import torch  # here, since nothing else in this file needs it and the ranks must set it up first

    private = dtensor_plans._private()
    seconds = []
    with fake_world(mesh.size), patch.object(torch.cuda, "device_count", lambda: dtensor_plans.GPUS_PER_HOST):
        device_mesh = dtensor_plans._device_mesh(mesh)
        strides = torch.empty(PLANNED_SHAPE, device="meta").stride()
        meta = private.TensorMeta(torch.Size(PLANNED_SHAPE), strides, torch.float32)
        for pair in [pairs[0], *pairs]:  # the first one twice: it pays for imports, and is not counted
            specs = [dtensor_plans._spec(private, device_mesh, meta, layout, mesh) for layout in pair]
            private.clear_redistribute_planner_cache()
            with private.use_min_cost_redistribution_plan(enabled=min_cost):
                start = time.thread_time()
                private._gen_transform_infos_non_cached(*specs)
                seconds.append(time.thread_time() - start)
    return seconds[1:]
