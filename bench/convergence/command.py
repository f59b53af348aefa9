"""Sparse exchange against dense, by what the models have learnt: `python -m bench.convergence`.

Four virtual workers in one process share weights; each has the gradient of its own part of the batch. Every contender's
learning rate is the best of the same grid on a seed of its own; then all train on the same five seeds. Runs whose results are
there already are not run again, so a run may be stopped at any time; delete them when a rule has changed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.convergence.page import page, section
from bench.convergence.rules import SPARSE, Rule, Sending, dense_rule
from bench.convergence.tasks import TASKS, WORKERS, Task
from bench.machine import machine
from scrimp.zoo import generator

RESULTS = Path(__file__).parents[1] / "results" / "convergence" / "rows.json"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "results" / "raw"
TUNING_SEED, SEEDS = 0, (1, 2, 3, 4, 5)
LR_GRID = {"SGD": (0.05, 0.1, 0.2, 0.4, 0.8), "AdamW": (0.0025, 0.005, 0.01, 0.02)}
LR_RISE, LR_LAST = 0.05, 0.1  # of the steps; of the learning rate, to which it sinks by a cosine
WEIGHT_DECAY = {"SGD": 0.0, "AdamW": 0.01}
WARM = 0.1  # of the steps, in which the density sinks
SMALL = 4096  # parameters with fewer elements are always exchanged whole
POINTS = 20  # of a curve

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """`rule` is that of a sparse one, `family` that of what travels whole. `lr_of`: whose learning rate it takes, where it has
    no search of its own."""

    name: str
    family: str
    rule: str = ""
    sending: Sending | None = None
    lr_of: str | None = None


def _family(family: str) -> list[Contender]:
    dense = Contender(name=f"{family}, dense", family=family)
    sparse = replace(dense, name=f"{family}, sparse", rule=family, sending=Sending())
    small = [
        replace(sparse, name=f"{sparse.name}, {kind} residual", sending=Sending(residual=kind), lr_of=sparse.name)
        for kind in ("bf16", "int8")
    ]
    return [dense, sparse, *small]


CONTENDERS = (
    *_family("SGD"),
    *_family("AdamW"),
    Contender(name="AdamW, sparse, raw", family="AdamW", rule="raw", sending=Sending()),
)


def train(task: Task, contender: Contender, lr: float, seed: int, steps: int) -> Row:
    """Losses by step on data never trained on; what is not finite ends the run."""
    torch.manual_seed(seed)
    model = task.model()
    parameters = sorted(model.parameters(), key=lambda parameter: parameter.numel() < SMALL)  # the small ones last
    weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = weights[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    sending = contender.sending and replace(contender.sending, warm_steps=round(WARM * steps))
    sizes = [parameter.numel() for parameter in parameters if parameter.numel() >= SMALL and sending]
    few, whole = sum(sizes), dense_rule(contender.family, weights.numel() - sum(sizes))
    sparse: Rule | None = SPARSE[contender.rule](WORKERS, sizes, sending) if sending else None
    draw, began, points = generator("batches", seed), time.perf_counter(), []
    for step in range(steps):
        parts = zip(*(part.chunk(WORKERS) for part in task.batch(draw, step, seed)), strict=True)
        found = [torch.autograd.grad(model(*part), parameters) for part in parts]
        gradients = torch.stack([torch.cat([one.flatten() for one in of_worker]) for of_worker in found])
        rate = lr_at(lr, step, steps)
        weights.mul_(1 - rate * WEIGHT_DECAY[contender.family])
        if sparse:
            weights[:few] -= sparse.step(gradients[:, :few], rate)
        weights[few:] -= whole.step(gradients[:, few:], rate)
        if (step + 1) * POINTS // steps > step * POINTS // steps:
            score = task.score(model)
            if not math.isfinite(score.loss):
                break
            points.append([step + 1, score.loss, score.accuracy])
    ended = len(points) and points[-1][0] == steps
    last = {"loss": points[-1][1], "accuracy": points[-1][2]} if ended else {"loss": None, "accuracy": None}
    return {**key_of(task.name, contender, lr, seed, steps), **last, "points": points, "seconds": time.perf_counter() - began}


def lr_at(lr: float, step: int, steps: int) -> float:
    fall = LR_LAST + (1 - LR_LAST) * (1 + math.cos(math.pi * step / steps)) / 2
    return lr * fall * min(1.0, (step + 1) / (LR_RISE * steps))


def key_of(task: str, contender: Contender, lr: float, seed: int, steps: int) -> Row:
    return {"task": task, "contender": contender.name, "lr": lr, "seed": seed, "steps": steps}


class MissingError(Exception):
    """A row that is not in a book that is closed."""


class Book:
    """The rows, in a file that is written after each run. A closed one runs nothing."""

    def __init__(self, path: Path) -> None:
        self.path, self.closed = path, False
        there = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "rows": []}
        self.machine: dict[str, str] = there["machine"]
        self.rows: list[Row] = there["rows"]

    def row(self, task: Task, contender: Contender, lr: float, seed: int, steps: int) -> Row:
        key = key_of(task.name, contender, lr, seed, steps)
        for row in self.rows:
            if key.items() <= row.items():
                return row
        if self.closed:
            raise MissingError(key)
        row = train(task, contender, lr, seed, steps)
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.path.with_suffix(".part")
        self.machine = machine()
        fresh.write_text(json.dumps({"machine": self.machine, "rows": self.rows}).replace('{"task"', '\n{"task"'))
        fresh.replace(self.path)
        loss = "diverged" if row["loss"] is None else f"loss {row['loss']:.4f}, accuracy {row['accuracy']:.4f}"
        print(f"{task.name}: {contender.name}, lr {lr:g}, seed {seed}: {loss}, {row['seconds']:.0f} s", flush=True)
        return row


def tuned(book: Book, task: Task, contender: Contender, steps: int) -> float:
    """The learning rate of least loss in runs of half the length, on the seed that serves for nothing else."""
    if contender.lr_of:
        contender = next(one for one in CONTENDERS if one.name == contender.lr_of)
    grid = LR_GRID[contender.family]
    losses = [book.row(task, contender, lr, TUNING_SEED, steps // 2)["loss"] for lr in grid]
    best = min(range(len(grid)), key=lambda i: math.inf if losses[i] is None else losses[i])
    if best in (0, len(grid) - 1) and not book.closed:
        print(f"{task.name}: {contender.name}: lr {grid[best]:g} is best, but at an end of the grid", flush=True)
    return grid[best]


def rows_of(book: Book, task: Task, contender: Contender, seeds: int, steps: int) -> list[Row]:
    lr = tuned(book, task, contender, steps)
    return [book.row(task, contender, lr, seed, steps) for seed in SEEDS[:seeds]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", action="append", choices=[*TASKS], help="all, if none is given")
    parser.add_argument("--contender", action="append", choices=[one.name for one in CONTENDERS], help="all, if none is given")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many of the seeds")
    parser.add_argument("--steps", type=int, help="for trying this out")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    book, tasks = Book(args.results), [task() for task in TASKS.values()]
    for task in tasks:
        for contender in CONTENDERS:
            if task.name in (args.task or TASKS) and contender.name in (args.contender or [contender.name]):
                rows_of(book, task, contender, args.seeds, args.steps or task.steps)
    book.closed = True
    sections = []
    for task in tasks:
        found = {}
        for contender in CONTENDERS:
            with suppress(MissingError):
                found[contender.name] = rows_of(book, task, contender, args.seeds, args.steps or task.steps)
        if found:
            sections.append(section(args.docs, task, found))
    print("\n".join(sections))
    (args.docs / "convergence.md").write_text(page(sections, book.machine))
