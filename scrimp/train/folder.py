"""The run folder: new, or of a run that goes on. Nothing is written here but config.toml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scrimp.errors import RunError
from scrimp.report import replace_text

NEW, RESUME, AUTO = "new", "resume", "auto"
CONFIG, CHECKPOINTS, REPORT, EVENTS, PLAN = "config.toml", "checkpoints", "report.html", "tensorboard", "plan.json"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins: at a checkpoint, or at step 0."""

    folder: Path
    checkpoint: Path | None = None


def is_run(path: Path) -> bool:
    return (path / "run.json").exists()


def config_of(run: Path) -> Path:
    """The configuration that a run was started with."""
    if not run.is_dir():
        raise RunError(f"there is no run folder {run}")
    for name in ("run.json", CONFIG):
        if not (run / name).exists():
            raise RunError(f"{run} has no {name}: it is no folder of scrimp train")
    return run / CONFIG


def start_of(folder: Path, how: str) -> Start:
    """`how`: NEW refuses a folder with a run, RESUME one without, AUTO takes either."""
    if how == NEW and is_run(folder):
        raise RunError(
            f"{folder} has a run: go on with it by scrimp train --resume {folder}, or give another folder by --set run.folder=..."
        )
    if how == NEW and folder.is_dir() and any(folder.iterdir()):
        raise RunError(f"{folder} has other files and no run: give a new or an empty folder by --set run.folder=...")
    from scrimp.checkpoint import latest  # loads torch, which `scrimp top` does not need

    found = latest(folder / CHECKPOINTS)
    if how == RESUME and found is None:
        raise RunError(
            f"{folder} has no complete checkpoint in {CHECKPOINTS}/, so there is nothing to resume: start without --resume, in "
            "another folder"
        )
    return Start(folder=folder, checkpoint=found)


def write_config(folder: Path, text: str) -> None:
    replace_text(folder / CONFIG, text)


def check_same_order(saved: Any, here: dict[str, int]) -> None:
    """A resumed run must see the samples that an uninterrupted one would have seen."""
    if not isinstance(saved, dict):
        raise RunError("the checkpoint was not written by scrimp train: it does not say at which sample the data are")
    names = {
        "seed": "[train] seed", "batch": "[train] batch", "seq": "[data] seq", "training": "the number of training samples",
        "held_out": "the number of held-out samples",
    }  # fmt: skip
    for key, words in names.items():
        if saved.get(key) != here[key]:
            raise RunError(
                f"{words} was {saved.get(key)} when the checkpoint was written, and is {here[key]} now: the resumed run would "
                "see other samples; use the same data and the same settings of [data], [train] and [validation]"
            )
