"""From `Engine(model, plan=plan)` to the end of the first step: with an empty cache, and again in new processes.

    python -m bench.run.start [--dim 256] [--heads 8] [--layers 32] [--vocab 2048] [--seq 64] [--batch 8] [--ranks 8]
                              [--part tp] [--part zero-3] [--part least] [--quick] [--json FILE]

    tp        Megatron's tensor parallelism over all ranks
    zero-3    data parallelism with everything sharded
    least     the plan of least memory on two axes, of 2 and of ranks / 2

The plan is made, the ranks are started and have imported torch, and the model is built, before the clock starts. A start is the
time from a barrier until the last rank has its first loss. Seconds of parts are those of rank 0, of the wall; parts of a step
contain each other. Ends with 1 if a second start gives another loss; times are figures of this machine and fail nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import scrimp
from bench.machine import machine
from bench.run.command import planned
from bench.run.ways import MODEL, OPTIMIZER, built
from scrimp import Engine, Plan, zoo
from scrimp.ext.ranks import RankPool

PARTS = ("tp", "zero-3", "least")
COLD, WARM = "empty cache", "again"
QUICK = {"dim": 32, "layers": 1, "vocab": 64, "seq": 8, "batch": 8, "ranks": 2}
JOB_SECONDS, PLAN_SECONDS = 1200.0, 20.0

WATCHED = {
    "capture or cache": ("scrimp.engine.lowered.program.graph_of",),
    "lowering": ("scrimp.engine.lowered.program.lower",),
    "comparing programs": ("scrimp.lower.moves.Ranks.agree",),
    "weights into the store": ("scrimp.engine._training.adopt",),
    "gradients": ("scrimp.engine._training.compute_gradients",),
    "  source of programs": ("scrimp.lower.source.Generated._function",),
    "  planning of moves": (
        "scrimp.lower.moves.synthesize",
        "scrimp.lower.weights.tiles.synthesize",
        "scrimp.lower.weights.joined.synthesize",
    ),
    "  moves": ("scrimp.engine.lowered.passes.MeteredRanks.move",),
    "update": ("scrimp.engine._training.Training.finish",),
}


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """The seconds inside the functions of `WATCHED`, by part."""
    seconds = dict.fromkeys(WATCHED, 0.0)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - start

        return run

    with ExitStack() as stack:
        for part, names in WATCHED.items():
            for name in names:
                stack.enter_context(mock.patch(name, timed(part, pkgutil.resolve_name(name))))
        yield seconds


def started(plan: str, shape: dict[str, int], rows: int) -> dict[str, Any]:
    """Runs on every rank."""
    model, batch, found = built(shape), zoo.example_batch(MODEL, rows, **shape), Plan.from_json(plan)
    dist.barrier()
    with watched() as parts:
        start, cpu = time.perf_counter(), time.process_time()
        engine = Engine(model, plan=found, optimizer=OPTIMIZER, precision=found.precision, device="cpu")
        built_at = time.perf_counter()
        loss = float(engine.step(*batch))
        end, used = time.perf_counter(), time.process_time() - cpu
    return {"engine": built_at - start, "step": end - built_at, "all": end - start, "cpu": used, "loss": loss, "parts": parts}


def plan_of(part: str, shape: dict[str, int], rows: int, ranks: int) -> str:
    if part != "least":
        return planned(part, shape, rows, ranks)
    model, batch = zoo.build(MODEL, **shape), zoo.example_batch(MODEL, rows, **shape)
    mesh = f"x=2,y={ranks // 2}" if ranks > 2 else f"x={ranks}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = scrimp.plan(model, batch, f"{ranks}xCPU", mesh=mesh, precision="fp32", optimizer="sgd", time_limit=PLAN_SECONDS)
    return made.to_json()


def both_starts(plan: str, shape: dict[str, int], rows: int, ranks: int) -> dict[str, dict[str, Any]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        for start in (COLD, WARM):
            with RankPool(ranks, timeout_seconds=JOB_SECONDS) as pool:
                results = pool.run("bench.run.start:started", plan, shape, rows)
            found[start] = {**results[0], **{key: max(each[key] for each in results) for key in ("all", "cpu")}}
    return found


def table(parts: dict[str, dict[str, dict[str, Any]]]) -> str:
    columns = [(part, start) for part in parts for start in (COLD, WARM)]
    lines = [f"{'seconds':26}" + "".join(f"{part:>14}" for part, _ in columns)]
    lines.append(" " * 26 + "".join(f"{start:>14}" for _, start in columns))

    def row(name: str, value: Callable[[dict[str, Any]], float]) -> str:
        return f"{name:26}" + "".join(f"{value(parts[part][start]):14.2f}" for part, start in columns)

    for name in ("all", "engine", "step"):
        lines.append(
            row({"all": "start to first loss", "engine": "Engine(...)", "step": "first step"}[name], lambda at, k=name: at[k])
        )
    lines += [row(name, lambda at, k=name: at["parts"][k]) for name in WATCHED]
    lines.append(row("CPU of a rank, at most", lambda at: at["cpu"]))
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"dim": 256, "heads": 8, "layers": 32, "vocab": 2048, "seq": 64, "batch": 8, "ranks": 8}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this one; may be given again")
    parser.add_argument("--quick", action="store_true", help="a model that is too small to say anything about time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    if arguments.quick:
        vars(arguments).update(QUICK)
    shape = {key: getattr(arguments, key) for key in ("dim", "heads", "layers", "vocab", "seq")}
    parts = {}
    for part in arguments.part or PARTS:
        plan = plan_of(part, shape, arguments.batch, arguments.ranks)
        parts[part] = both_starts(plan, shape, arguments.batch, arguments.ranks)
    settings = {key: value for key, value in vars(arguments).items() if key != "json"}
    facts = machine()
    print(", ".join(f"{key} {facts[key]}" for key in ("cpu", "cores", "load", "torch", "commit")))
    print(", ".join(f"{key} {value}" for key, value in settings.items()))
    print(table(parts))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": facts, "settings": settings, "parts": parts}, indent=2))
    if any(each[COLD]["loss"] != each[WARM]["loss"] for each in parts.values()):
        print("a second start gives another loss")
        sys.exit(1)


if __name__ == "__main__":
    main()
