"""Configurations of short runs, and what their metrics say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scrimp.report import read_metrics
from scrimp.train import NEW, Outcome, read_config, train

TOML = """
[model]
name = "gpt-tiny"
settings = { vocab = 256, layers = 1, dropout = 0.1 }

[data]
text = "text.txt"

[train]
steps = 6
batch = 4
device = "cpu"

[memory]
device = "64MiB"
host = "1GiB"

[optimizer]
lr = 1e-2

[schedule]
kind = "cosine"
warm_up = 2

[validation]
every = 3
batches = 2

[checkpoint]
every = 2

[metrics]
report = false

[run]
folder = "run"
"""
TEXT = "".join(f"The run number {k} has {k * k % 97} steps, and each of them {k % 7} samples.\n" for k in range(120))


def written(folder: Path, toml: str = TOML) -> Path:
    """A configuration with its text, in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(TEXT)
    (folder / "config.toml").write_text(toml)
    return folder / "config.toml"


def run(config: Path, *settings: str, how: str = NEW, folder: Path | None = None, **more: Any) -> Outcome:
    """Trains without a word."""
    into = [f"run.folder={folder}"] if folder is not None else []
    return train(read_config(config, [*settings, *into]), how=how, quiet=True, **more)


def run_on_a_rank(config: str, settings: list[str], how: str) -> tuple[int, int]:
    """The same as a job of a pool of ranks."""
    outcome = train(read_config(config, settings), how=how, quiet=True)
    return outcome.steps, outcome.signal


def figures(folder: Path, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row.get(name) for name in names) for row in read_metrics(folder / "metrics.jsonl")]


def losses(folder: Path) -> list[tuple[Any, ...]]:
    return figures(folder, "step", "loss", "validation_loss", "lr")
