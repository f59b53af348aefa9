"""docs/results/raw/convergence.md and its curves from the rows of `bench.convergence`: every figure comes from there."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.convergence.tasks import WORKERS, Task
from bench.svg import Series, plot

Row = dict[str, Any]
Rows = Mapping[str, Sequence[Row]]  # by contender, in the order of the seeds

INTRODUCTION = f"""# Convergence

Written by `make bench-convergence` from `bench/results/convergence/`. {WORKERS} workers in one process share weights, and each
has the gradient of its own part of the batch. "Sparse" sends 1 % of every parameter of 4096 elements or more from each worker,
as bf16, and the others whole: of Adam's own update, but of bare gradients, from which Adam is computed after their arrival,
where it says "raw". The learning rate of each contender is the best of the same grid, in runs of half the length on a seed
that serves for nothing else; those with residuals of fewer bits take that of fp32, so that nothing but the residual differs.
Figures are means over seeds, with their standard errors; "over dense" is the mean of the differences seed by seed, as equal
seeds begin with equal weights and see equal batches.
"""
FIGURES = ("loss", "accuracy")
COLUMNS = ("contender", "learning rate", "loss", "accuracy", "loss over dense", "accuracy over dense")
ASKED = {  # the most that the sparse one may be worse than the dense one, on which figure
    "text": {"SGD, sparse": ("loss", 0.02), "AdamW, sparse": ("loss", 0.04)},
    "images": {"SGD, sparse": ("accuracy", 0.01), "AdamW, sparse": ("accuracy", 0.01)},
}


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def over(rows: Sequence[Row], dense: Sequence[Row], figure: str) -> tuple[float, float]:
    return mean_and_error([row[figure] - base[figure] for row, base in zip(rows, dense, strict=True)])


def dense_of(name: str) -> str:
    return f"{name.partition(',')[0]}, dense"


def section(docs: Path, task: Task, rows: Rows) -> str:
    """The table and the targets, as Markdown; the curves are drawn into files."""
    steps = next(iter(rows.values()))[0]["steps"]
    seeds = len(next(iter(rows.values())))
    lines = [f"## {task.title}", "", f"{steps} steps, {seeds} seeds{task.remark}.", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    whole = {name: of for name, of in rows.items() if all(row["loss"] is not None for row in of)}
    for name, of in rows.items():
        cells = [name, f"{of[0]['lr']:g}"]
        cells += [_text(mean_and_error([row[figure] for row in of])) if name in whole else "diverged" for figure in FIGURES]
        dense = whole.get(dense_of(name))
        known = name in whole and dense is not None and dense is not of
        cells += [_text(over(of, dense, figure), "+") if known and dense else "" for figure in FIGURES]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for name, (figure, most) in ASKED[task.name].items():
        if name in whole and dense_of(name) in whole:
            mean, error = over(whole[name], whole[dense_of(name)], figure)
            worse = mean if figure == "loss" else -mean
            verdict = "reached" if worse <= most else "NOT REACHED"
            lines.append(f"- {name}: {figure} worse by {worse:.4f} (s.e. {error:.4f}), at most {most:g} asked: {verdict}")
    for family in dict.fromkeys(name.partition(",")[0] for name in whole):
        path = docs / f"convergence-{task.name}-{family.lower()}.svg"
        docs.mkdir(parents=True, exist_ok=True)
        path.write_text(_curves(task, {name: of for name, of in whole.items() if name.startswith(family)}, family))
        lines += ["", f"![{task.title}, {family}]({path.name})"]
    return "\n".join([*lines, ""])


def page(sections: Sequence[str], machine: Mapping[str, str]) -> str:
    where = ", ".join(f"{name} {machine[name]}" for name in ("cpu", "torch", "commit"))
    return "\n".join([INTRODUCTION, f"Last run on: {where}.", "", *sections])


def _text(figure: tuple[float, float], sign: str = "") -> str:
    return f"{figure[0]:{sign}.4f} ± {figure[1]:.4f}"


def _curves(task: Task, rows: Rows, family: str) -> str:
    """The figure of the target, by step, mean over seeds."""
    figure = 1 + FIGURES.index(task.figure)
    series = []
    for colour, (name, of) in enumerate(rows.items()):
        by_step = list(zip(*(row["points"] for row in of), strict=True))
        points = [(at[0][0], statistics.fmean(point[figure] for point in at)) for at in by_step]
        series.append(Series(name=name, points=points, colour=colour, mark=False))
    if task.floor:
        last = max(point[0] for one in series for point in one.points)
        series.append(Series(name="entropy", points=[(0, task.floor), (last, task.floor)], colour=6, dashed=True, mark=False))
    return plot(f"{task.title}, {family}", "steps", f"validation {task.figure}", series)
