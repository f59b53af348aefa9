"""The work of `scrimp report` and `scrimp compare`, without torch."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from scrimp.cli._end import UsageError, typed
from scrimp.cli._files import check_writable
from scrimp.cli.render.table import print_table
from scrimp.errors import ScrimpError
from scrimp.report import Cell, Run, figure_rows, named_apart, peak_rows, read, read_plan, rehearsal_of, write, write_events
from scrimp.report import compare as write_comparison

if TYPE_CHECKING:
    from rich.console import Console


def report(source: Path, out: Path, *, plan: Path | None, rehearsal: Path | None, tensorboard: Path | None) -> None:
    with typed():
        check_writable("--out", out)
        run = read(source)
        if plan is not None:
            run = replace(run, plan=read_plan(plan))
        if rehearsal is not None:
            run = replace(run, rehearsal=rehearsal_of(rehearsal))
        if tensorboard is not None:
            _check_metrics(run)
    write(run, out)
    typer.echo(f"written to {out}")
    if tensorboard is not None:
        typer.echo(f"written to {write_events(tensorboard, run.metrics, _began(run))}")


def compare(console: Console, sources: list[Path], out: Path | None, *, tensorboard: Path | None) -> None:
    with typed():
        check_writable("--out", out)
        if len(sources) < 2:
            raise UsageError("a comparison takes two or more runs or plans")
        runs = named_apart([read(source) for source in sources])
        with_metrics = [run for run in runs if run.metrics]
        if tensorboard is not None and not with_metrics:
            _check_metrics(runs[0])
    names = tuple(run.name for run in runs)
    for rows in (figure_rows(runs), peak_rows(runs)):
        print_table(console, ("", *names), [(name, *map(_text, cells)) for name, cells in rows], right=names)
        console.print()
    if out is not None:
        write_comparison(runs, out)
        typer.echo(f"written to {out}")
    for run in with_metrics if tensorboard is not None else ():
        assert tensorboard is not None
        typer.echo(f"written to {write_events(tensorboard / run.name, run.metrics, _began(run))}")


def _text(cell: object) -> str:
    return cell.text if isinstance(cell, Cell) else str(cell)


def _check_metrics(run: Run) -> None:
    if not run.metrics:
        raise ScrimpError(f"--tensorboard: '{run.name}' has no metrics; scrimp.Progress(engine, run=folder) writes them")


def _began(run: Run) -> float:
    assert run.run is not None  # only a run has metrics
    return datetime.fromisoformat(run.run["began"]).timestamp()
