"""The work of `scrimp train`: reads the configuration without torch, then trains, and ends with the code of a signal."""

from __future__ import annotations

from pathlib import Path
from signal import Signals

import typer

from scrimp.cli._end import UsageError, typed
from scrimp.train import AUTO, NEW, RESUME, Resolved, config_of, read_config


def train(source: Path, settings: list[str], *, resume: bool, resume_auto: bool, dry_run: bool, quiet: bool) -> None:
    how = AUTO if resume_auto else RESUME if resume else NEW
    with typed():
        if resume and resume_auto:
            raise UsageError("--resume and --resume-auto: give one of them")
        if dry_run and how != NEW:
            raise UsageError("--dry-run trains nothing, so there is nothing to resume: leave out one of them")
        resolved = _read(source, settings, how)
    from scrimp.train import train as run  # loads torch

    outcome = run(resolved, how=how, dry_run=dry_run, quiet=quiet, say=typer.echo)
    if dry_run or not outcome.first:
        raise typer.Exit(128 + outcome.signal if outcome.signal else 0)
    if outcome.signal:
        name = Signals(outcome.signal).name
        if outcome.checkpoint is None:
            words = f"before a step; begin again with: scrimp train --resume-auto {source}"
        else:
            words = f"after step {outcome.steps}; the checkpoint is {outcome.checkpoint}; go on with: "
            words += f"scrimp train --resume {outcome.folder}"
        typer.echo(f"stopped by {name} {words}", err=True)
        raise typer.Exit(128 + outcome.signal)
    if not quiet:
        loss = "" if outcome.loss is None else f", loss {outcome.loss:.4f}"
        typer.echo(f"done: {outcome.steps} steps{loss}; everything is in {outcome.folder}")


def _read(source: Path, settings: list[str], how: str) -> Resolved:
    if not source.is_dir():
        return read_config(source, settings)
    if how == NEW:
        raise UsageError(f"{source} is a folder: give a configuration, or --resume for a run folder")
    moved = [] if any(each.startswith("run.folder=") for each in settings) else [f"run.folder={source}"]
    return read_config(config_of(source), [*settings, *moved])
