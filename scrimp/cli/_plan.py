"""What `scrimp plan` prints: the plan's memory, time and choices; and the file it writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from scrimp.cli._models import model_and_batch
from scrimp.cluster import Cluster
from scrimp.errors import ScrimpError
from scrimp.planner._ways import KEEP, WAYS
from scrimp.planner.api import plan

if TYPE_CHECKING:
    from rich.console import Console

    from scrimp.planner._plan import Plan


def make(
    console: Console, *, model: str, cluster: str, mesh: str | None, budget: str | None, batch: int, seq: int, objective: str,
    optimizer: str, precision: str, keep: bool, stages: str, micro_batches: str, interleave: int, settings: list[str],
    seconds: float, gap: float, out: Path | None,
) -> None:  # fmt: skip
    made, inputs = model_and_batch(model, batch, seq, settings)
    known = Cluster.load(Path(cluster)) if cluster.endswith(".toml") else Cluster.preset(cluster)
    with console.status("planning") as status:
        found = plan(
            made, inputs, known, mesh=mesh, budget=budget, objective=objective, optimizer=optimizer, precision=precision,
            saving=(KEEP,) if keep else WAYS, stages=_number(stages), micro_batches=_number(micro_batches), interleave=interleave,
            seconds=seconds, gap=gap, progress=status.update,
        )  # fmt: skip
    console.print(found.summary(), soft_wrap=True)
    console.print()
    console.print(_choices(found))
    if out is not None:
        try:
            found.save(out)
        except OSError as error:
            raise ScrimpError(f"{out} cannot be written: {error.strerror}") from error
        console.print(f"written to {out}", soft_wrap=True)


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
