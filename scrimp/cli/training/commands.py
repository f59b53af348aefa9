"""The commands `scrimp train` and `scrimp top`: their options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


class TrainCommand(TyperCommand):
    """`--resume auto` is another spelling of `--resume-auto`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spelled(args))


def spelled(args: list[str]) -> list[str]:
    found: list[str] = []
    for word in args:
        if word == "auto" and found[-1:] == ["--resume"]:
            found[-1] = "--resume-auto"
        else:
            found.append("--resume-auto" if word == "--resume=auto" else word)
    return found


def train(
    source: Annotated[
        Path, typer.Argument(metavar="CONFIG|RUN", help="A configuration, such as config.toml; to resume also a run folder.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Overrides the configuration. May be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of the run folder.")] = False,
    resume_auto: Annotated[
        bool, typer.Option("--resume-auto", help="Go on if there is a checkpoint, else begin. Also: --resume auto.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, plan and rehearse on meta. Nothing is trained or written.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only. Metrics are still written.")] = False,
) -> None:
    r"""Train a model as a TOML file says, alone or under torchrun.

    The run folder gets config.toml, metrics.jsonl, plan.json, checkpoints/ and
    report.html. Every key of the file is in docs/reference/config.md.

    SIGTERM and Ctrl-C finish the step and save; the exit codes are 143 and 130.
    A resumed run sees the same samples at any number of ranks. Workers that
    torchrun restarts resume by themselves.

    Examples
      scrimp train examples/gpt.toml --dry-run
      scrimp train examples/gpt.toml --set train.steps=20 --set run.folder=short
      scrimp train --resume short --set train.steps=30
      torchrun --nproc-per-node 2 -m scrimp train examples/machine.toml
    """
    from scrimp.cli.training import work

    work.train(source, settings or [], resume=resume, resume_auto=resume_auto, dry_run=dry_run, quiet=quiet)


def top(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of this or of another process.")],
    once: Annotated[bool, typer.Option("--once", help="Print the last step and end.")] = False,
    seconds: Annotated[float, typer.Option(help="Time between two looks into the folder.", min=0.1, max=3600)] = 1.0,
) -> None:
    """Follow a run: step, loss, speed, bytes and time to go.

    It only reads the folder. Ctrl-C ends it; the run goes on.

    Examples
      scrimp top short --once
      scrimp top short
    """
    from scrimp.cli._console import console
    from scrimp.cli.training import follow

    follow.top(console(), folder, once=once, seconds=seconds)
