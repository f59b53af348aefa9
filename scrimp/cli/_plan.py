"""What `scrimp plan` prints: the plan's memory, time and choices; and the file it writes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from scrimp.cli._models import model_and_batch
from scrimp.cluster import Cluster
from scrimp.errors import FitError, PlanWarning, ScrimpError
from scrimp.ledger import format_nbytes
from scrimp.planner._ways import KEEP, WAYS
from scrimp.planner._what_if import change_of
from scrimp.planner.api import limit_of, plan
from scrimp.planner.beside import Beside, beside

if TYPE_CHECKING:
    from rich.console import Console

    from scrimp.planner._plan import Plan


def make(
    console: Console, *, model: str, cluster: str, mesh: str | None, budget: str | None, batch: int, seq: int, objective: str,
    optimizer: str, precision: str, keep: bool, stages: str, micro_batches: str, interleave: int, settings: list[str],
    seconds: float, gap: float, out: Path | None, explain: list[str], what_if: list[str], baselines: bool = False,
) -> None:  # fmt: skip
    for text in what_if:
        change_of(text)  # says what is wrong with it before the model is looked at
    made, inputs = model_and_batch(model, batch, seq, settings)
    known = Cluster.load(Path(cluster)) if cluster.endswith((".toml", ".json")) else Cluster.preset(cluster)
    with console.status("planning") as status, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", PlanWarning)
        found = plan(
            made, inputs, known, mesh=mesh, budget=budget, objective=objective, optimizer=optimizer, precision=precision,
            saving=(KEEP,) if keep else WAYS, stages=_number(stages), micro_batches=_number(micro_batches), interleave=interleave,
            seconds=seconds, gap=gap, progress=status.update,
        )  # fmt: skip
    for each in dict.fromkeys(str(warning.message) for warning in told if issubclass(warning.category, UserWarning)):
        typer.echo(f"warning: {each}", err=True)
    console.print(found.summary(), soft_wrap=True)
    console.print()
    console.print(_choices(found))
    if baselines:
        with console.status("planning known parallelisms") as status:
            others = beside(found, say=status.update)
        console.print()
        console.print(_beside(found, others, limit_of(known, budget)))
        for reason, names in _reasons(others).items():
            console.print(f"{', '.join(names)}: {reason}", soft_wrap=True)
    if out is not None:
        try:
            found.save(out)
        except OSError as error:
            raise ScrimpError(f"{out} cannot be written: {error.strerror}") from error
        console.print(f"written to {out}", soft_wrap=True)
    for name in explain:
        with console.status(f"looking for the next best of {name}"):
            words = found.explain(name).text()
        console.print(f"\n{words}", soft_wrap=True)
    for text in what_if:
        console.print(f"\nwhat if {text}", style="bold", soft_wrap=True)
        console.print(_what_if(console, found, text, seconds, gap), soft_wrap=True)


def _what_if(console: Console, found: Plan, text: str, seconds: float, gap: float) -> str:
    try:
        with console.status(f"what if {text}") as status:
            return found.diff(found.what_if(text, seconds=seconds, gap=gap, progress=status.update)).text()
    except FitError as error:  # an answer too
        return f"it does not fit: {error}"


def _number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _choices(found: Plan) -> Table:
    """The weights of every part: how they are used, and over which axes they are shared out at rest."""
    table = Table(box=None, pad_edge=False)
    for title in ("layers", "weight", "in use", "weight over", "states over"):
        table.add_column(title, overflow="fold")
    for layers in found.layers:
        span = f"{layers.path or 'the model'}{f' and {layers.count - 1} more' if layers.count > 1 else ''}"
        for weight in layers.weights:
            table.add_row(span, weight.name, weight.layout, "*".join(weight.weight_axes), "*".join(weight.state_axes))
            span = ""
    return table


def _beside(found: Plan, others: list[Beside], limit: int) -> Table:
    """The plan, then known parallelisms."""
    table = Table(box=None, pad_edge=False)
    for title in ("plan", "mesh", "peak", "states", "activations", "temporaries", "redundant", "step s", "fits"):
        table.add_column(title, justify="left" if title in ("plan", "mesh", "fits") else "right", no_wrap=True)
    rows = [("this plan", found), *((other.name, other.plan) for other in others if other.plan is not None)]
    for name, each in rows:
        kinds = {kind.kind: kind.nbytes for kind in each.memory.kinds}
        states = sum(kinds.get(kind, 0) for kind in ("parameters", "gradients", "optimizer"))
        sizes = (each.memory.peak_nbytes, states, kinds.get("activations", 0), kinds.get("temporaries", 0))
        redundant = sum(kind.redundant_nbytes for kind in each.memory.kinds)
        table.add_row(
            name, str(each.mesh), *map(format_nbytes, (*sizes, redundant)), f"{each.seconds:.4g}",
            "yes" if each.memory.peak_nbytes <= limit else "no",
        )  # fmt: skip
    return table


def _reasons(others: list[Beside]) -> dict[str, list[str]]:
    """Why some cannot be made."""
    found: dict[str, list[str]] = {}
    for other in others:
        if other.plan is None:
            found.setdefault(other.why, []).append(f"{other.name} on {other.mesh}")
    return found
