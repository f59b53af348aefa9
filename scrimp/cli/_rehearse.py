"""`scrimp rehearse`: runs ranks of a plan file here, without the others, and prints memory and seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from scrimp.cli._end import typed
from scrimp.cli._files import write
from scrimp.cli._plan_check import BATCH, SEQ
from scrimp.cli.render.table import print_table, print_words
from scrimp.errors import ScrimpError
from scrimp.ledger import format_nbytes
from scrimp.planner import Plan
from scrimp.rehearsal import Rehearsal, rehearse, rehearse_all
from scrimp.train import FUNCTION, check_model, kind_of, model_and_batch

if TYPE_CHECKING:
    from rich.console import Console

ALL = "all"


def run(
    console: Console, plan: Plan, path: Path, *, rank: str, on: str, model: str | None, batch: int | None, seq: int | None,
    settings: list[str], as_json: bool, out: Path | None,
) -> None:  # fmt: skip
    with typed():
        number = _number(plan, rank)
        made, inputs = _built(plan, path, model, batch, seq, settings)
    with console.status("rehearsing"):
        found = rehearse_all(plan, made, inputs, on) if number is None else (rehearse(plan, made, inputs, number, on),)
    text = json.dumps([json.loads(each.to_json()) for each in found]) if number is None else found[0].to_json()
    if out is not None:
        write(out, text)
    if as_json:
        typer.echo(text)
        return
    for each in found[:1] if number is None else found:
        print_words(console, each.summary())
        console.print()
        _timeline(console, each)
    if number is None:
        console.print()
        _classes(console, found)
    if out is not None:
        console.print(f"written to {out}", soft_wrap=True)


def _number(plan: Plan, text: str) -> int | None:
    ranks = plan.mesh.size * (1 if plan.schedule is None else len(plan.schedule.stages))
    if text == ALL:
        return None
    if not text.isdecimal() or int(text) >= ranks:
        raise ScrimpError(f"--rank {text}: the plan is for {ranks} ranks: give 0 to {ranks - 1}, or all")
    return int(text)


def _built(plan: Plan, path: Path, model: str | None, batch: int | None, seq: int | None, settings: list[str]) -> Any:
    """The model that the plan names, with what the command line changes."""
    name = model or plan.model.name
    if not name:
        raise ScrimpError(f"{path} does not name its model: it was not made by scrimp plan; give --model")
    known = dict(plan.model.settings) if model is None else {}
    rows, tokens = (int(known.pop(key)) if key in known else None for key in ("batch", "seq"))
    chosen = [f"{key}={value}" for key, value in known.items()] + settings
    if kind_of(name) == FUNCTION:
        rows = tokens = None
    else:
        rows, tokens = batch or rows or BATCH, seq or tokens or SEQ
    check_model(name, batch, seq, chosen)
    return model_and_batch(name, rows or BATCH, tokens or SEQ, chosen)


def _timeline(console: Console, found: Rehearsal) -> None:
    """The largest point of each pass of each layer."""
    passes: dict[str, int] = {}
    for at, point in enumerate(found.points):
        name = ", ".join(point.removeprefix("before ").split(", ")[:2])
        if name not in passes or found.totals[at] > found.totals[passes[name]]:
            passes[name] = at
    kinds = [kind for kind, row in found.kinds.items() if any(row[at] for at in passes.values())]
    shown = _shown([*passes.items()])
    headers = ("at most in", "all", *kinds)
    rows = []
    for name, at in shown:
        sizes = (found.totals[at], *(found.kinds[kind][at] for kind in kinds)) if at >= 0 else ()
        rows.append((name, *map(format_nbytes, sizes)) if sizes else (name, *[""] * (len(kinds) + 1)))
    print_table(console, headers, rows, right=headers[1:])


def _shown(rows: list[tuple[str, int]], most: int = 24) -> list[tuple[str, int]]:
    """Of many passes the first and the last ones."""
    if len(rows) <= most:
        return rows
    half = most // 2
    return [*rows[:half], (f"... {len(rows) - 2 * half} more", -1), *rows[-half:]]


def _classes(console: Console, found: tuple[Rehearsal, ...]) -> None:
    headers = ("ranks", "rehearsed", "peak", "of the plan's", "communication s", "step s")
    rows = [
        (
            _ranks(each.ranks), str(each.rank), format_nbytes(each.peak.nbytes),
            f"{each.peak.nbytes / max(each.planned_nbytes, 1):.4f}",
            f"{each.communication_seconds:.4g}", f"{each.step_seconds:.4g}",
        )
        for each in found
    ]  # fmt: skip
    print_table(console, headers, rows, right=headers[1:])


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 4 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
