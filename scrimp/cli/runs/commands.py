"""The commands `scrimp report` and `scrimp compare`: their options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OUT = Annotated[Path, typer.Option("--out", "-o", help="The HTML file to write.")]


def report(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|PLAN", help="A run folder, as Progress(run=...) writes it, or a plan file.")
    ],
    out: OUT = Path("report.html"),
    plan: Annotated[Path | None, typer.Option(help="A plan file, in place of the one in the run folder.")] = None,
    rehearsal: Annotated[
        Path | None, typer.Option(help="A rehearsal's JSON file, whose timeline is shown as the prediction.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also write the metrics as TensorBoard events, into this folder.")
    ] = None,
) -> None:
    """Write what is known of a run, or of a plan, as one HTML file.

    The file needs no network and no other file. It shows the plan, memory over
    a step, predicted and measured, the residency of layers, traffic and time
    against the bound, exchange, loss, machine and versions.

    Examples
      scrimp plan gpt-tiny --cluster 2xCPU --mesh x=2 --out plan.json
      scrimp report plan.json -o plan.html
    """
    from scrimp.cli.runs import work

    work.report(source, out, plan=plan, rehearsal=rehearsal, tensorboard=tensorboard)


def compare(
    sources: Annotated[list[Path], typer.Argument(metavar="RUN|PLAN...", help="Two or more run folders or plan files.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write an HTML file.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also write each run's metrics as TensorBoard events, into folders in this one.")
    ] = None,
) -> None:
    """Show several runs or plans side by side, as a table and as one HTML file.

    Examples
      scrimp plan gpt-tiny --cluster 2xCPU --mesh x=2 --out a.json
      scrimp plan gpt-tiny --cluster 2xCPU --mesh x=2 --keep --out b.json
      scrimp compare a.json b.json -o compare.html
    """
    from scrimp.cli._console import console
    from scrimp.cli.runs import work

    work.compare(console(), sources, out, tensorboard=tensorboard)
