"""`scrimp plan`: prints the plan's memory, time and choices, and writes its file."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from scrimp._arguments import KEEP
from scrimp.cli._end import typed
from scrimp.cli._explained import check_explained
from scrimp.cli._files import write
from scrimp.cli._plan_check import number_of
from scrimp.cli.render.choices import show_choices
from scrimp.cli.render.table import print_table, print_words
from scrimp.errors import FitError, PlanWarning
from scrimp.planner import Comparison, compare, limit_of, plan
from scrimp.train import cluster_of, model_and_batch

if TYPE_CHECKING:
    from rich.console import Console

    from scrimp.cluster import Cluster
    from scrimp.planner import Plan


def make(
    console: Console, *, model: str, cluster: str, mesh: str | None, memory: str | None, batch: int, seq: int, objective: str,
    optimizer: str, precision: str, keep: bool, stages: str, micro_batches: str, interleave: int, settings: list[str],
    time_limit: float, gap: float, out: Path | None, explain: list[str], what_if: list[str], baselines: bool = False,
    report: Path | None = None, reserve: str | None = None,
) -> None:  # fmt: skip
    known = cluster_of(cluster)
    with typed():
        made, inputs = model_and_batch(model, batch, seq, settings)
        check_explained(made, explain)
    with console.status("planning") as status, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PlanWarning)
        found = plan(
            made, inputs, known, mesh=mesh, memory=memory, reserve=reserve, objective=objective, optimizer=optimizer,
            precision=precision, activations=KEEP if keep else "auto", stages=number_of(stages),
            micro_batches=number_of(micro_batches), interleave=interleave, time_limit=time_limit, gap=gap, progress=status.update,
        )  # fmt: skip
    written = (("batch", str(batch)), ("seq", str(seq)), *((each.partition("=")[0], each.partition("=")[2]) for each in settings))
    found = replace(found, model=replace(found.model, name=model, settings=written))
    for each in dict.fromkeys(str(warning.message) for warning in told if issubclass(warning.category, UserWarning)):
        typer.echo(f"warning: {each}", err=True)
    print_words(console, found.summary())
    console.print()
    show_choices(console, found)
    if baselines:
        with console.status("planning the baselines") as status:
            others = compare(found, say=status.update)
        console.print()
        _compare(console, found, others, lambda each: _fits(each, known, memory, reserve))
        for reason, names in _reasons(others).items():
            print_words(console, f"{', '.join(names)}: {reason}")
    if out is not None:
        write(out, found.to_json())
        console.print(f"written to {out}", soft_wrap=True)
    if report is not None:
        with console.status("searching alternatives"):
            found.report(report, time_limit=min(time_limit, 20.0))
        console.print(f"written to {report}", soft_wrap=True)
    for name in explain:
        with console.status(f"searching the next best choice for {name}"):
            words = found.explain(name).text()
        console.print()
        print_words(console, words)
    for text in what_if:
        console.print(f"\nwhat if {text}", style="bold", soft_wrap=True)
        print_words(console, _what_if(console, found, text, time_limit, gap))


def _what_if(console: Console, found: Plan, text: str, time_limit: float, gap: float) -> str:
    try:
        with console.status(f"what if {text}") as status:
            return found.diff(found.what_if(text, time_limit=time_limit, gap=gap, progress=status.update)).text()
    except FitError as error:  # not an error of the command: it is a result
        return f"it does not fit: {error}"


def _fits(each: Plan, cluster: Cluster, memory: str | None, reserve: str | None) -> bool:
    """Within the budget, without what is reserved on the plan's own mesh."""
    stages = 1 if each.schedule is None else len(each.schedule.stages)
    try:
        return each.memory.peak_nbytes <= limit_of(cluster, memory, reserve, each.mesh, stages)
    except FitError:  # the reserve leaves nothing
        return False


def _compare(console: Console, found: Plan, others: list[Comparison], fit: Callable[[Plan], bool]) -> None:
    """Prints the plan, then the baselines."""
    rows = [("this plan", found), *((other.name, other.plan) for other in others if other.plan is not None)]
    unit, size = _unit(max(each.memory.peak_nbytes for _, each in rows))
    headers = ("plan", "mesh", "peak", "states", "activ.", "temp.", "copies", "step s", "fits")
    lines = []
    for name, each in rows:
        kinds = {kind.kind: kind.nbytes for kind in each.memory.kinds}
        states = sum(kinds.get(kind, 0) for kind in ("parameters", "gradients", "optimizer"))
        temporary = sum(kinds.get(kind, 0) for kind in ("temporaries", "moved", "scratch"))
        sizes = (each.memory.peak_nbytes, states, kinds.get("activations", 0), temporary)
        redundant = sum(kind.redundant_nbytes for kind in each.memory.kinds)
        figures = [f"{nbytes / size:.1f}" for nbytes in (*sizes, redundant)]
        fits = "yes" if fit(each) else "no"
        lines.append((name, str(each.mesh), *figures, f"{each.seconds:.4g}", fits))
    print_table(console, headers, lines, right=headers[2:-1])
    console.print(f"Sizes are in {unit} a device: activ. activations, temp. temporaries, copies replicated on other devices.")


def _unit(nbytes: int) -> tuple[str, int]:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= 10 * size:
            return unit, size
    return "KiB", 1 << 10


def _reasons(others: list[Comparison]) -> dict[str, list[str]]:
    """Why some baselines have no plan."""
    found: dict[str, list[str]] = {}
    for other in others:
        if other.plan is None:
            found.setdefault(other.why, []).append(f"{other.name} on {other.mesh}")
    return found
