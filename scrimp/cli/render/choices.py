"""The table of a plan's choices: the weights of every layer. Consecutive layers with the same choices are one entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scrimp._arguments import KEEP
from scrimp.cli.render.table import table_blocks

if TYPE_CHECKING:
    from rich.console import Console

    from scrimp.planner import Plan, PlannedLayers

HEADERS = ("weight", "in use", "weight over", "states over")
INDENT = "  "


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive layers with the same choices: the paths of the first and the last, their number, the weights by their names in
    a layer, and how many of a layer's operators keep, recompute or offload their activations."""

    first: str
    last: str
    count: int
    rows: tuple[tuple[str, ...], ...]
    saved: tuple[tuple[str, int], ...]

    @property
    def title(self) -> str:
        first, last = self.first or "the model", self.last
        span = first if last in ("", first) else f"{first} - {last}"
        said = [f"{self.count} layers"] if self.count > 1 else []
        said += [f"{count} operators {way}" for way, count in self.saved if way != KEEP]
        return f"{span} ({', '.join(said)})" if said else span


def runs_of(plan: Plan) -> list[Run]:
    """In the order of the forward."""
    found: list[Run] = []
    for layers in sorted(plan.layers, key=lambda each: each.first):
        one = _run(layers)
        before = found[-1] if found else None
        if before is not None and (before.rows, before.saved) == (one.rows, one.saved) and one.first and before.first:
            found[-1] = Run(first=before.first, last=one.last, count=before.count + one.count, rows=one.rows, saved=one.saved)
        else:
            found.append(one)
    return found


def _run(layers: PlannedLayers) -> Run:
    rows = tuple(
        (
            weight.name.removeprefix(f"{layers.path}."),
            weight.layout,
            "*".join(weight.weight_axes),
            "*".join(weight.state_axes),
        )
        for weight in layers.weights
    )
    saved: dict[str, int] = {}
    for op in layers.ops:
        saved[op.saved] = saved.get(op.saved, 0) + 1
    return Run(
        first=layers.path,
        last=layers.last or layers.path,
        count=layers.count,
        rows=rows,
        saved=tuple(sorted(saved.items())),
    )


def show_choices(console: Console, plan: Plan) -> None:
    for line in choice_lines(runs_of(plan), console.width):
        console.print(line, soft_wrap=True)


def choice_lines(runs: Sequence[Run], width: int) -> list[str]:
    """Under the name of each run its weights, in the same columns for all runs."""
    rows = [row for run in runs for row in run.rows]
    if not rows:
        return ["The plan has no weights."]
    title, *body = table_blocks(HEADERS, rows, width - len(INDENT))
    lines = [INDENT + line for line in title]
    for run in runs:
        lines.append(run.title)
        for _ in run.rows:
            lines += [INDENT + line for line in body.pop(0)]
    return lines
