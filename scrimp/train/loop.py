"""The steps of a run: train, validate, record, save, and stop where a signal asked for it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from scrimp.checkpoint import prune, step_folder
from scrimp.engine import Engine, Progress
from scrimp.errors import RunError
from scrimp.report import read, write, write_events
from scrimp.train.config.sections import Config
from scrimp.train.data.batches import Batches, arguments
from scrimp.train.folder import CHECKPOINTS, EVENTS, REPORT
from scrimp.train.ranks import Ranks
from scrimp.train.stop import Stop


class Stopped(Exception):  # noqa: N818 - it is no error
    """A signal came to a rank; the checkpoint is written."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


@dataclass
class Loop:
    """One run on one rank. `rows`: what this rank takes of a batch. `order`: of the data. `tokens`: of a step."""

    engine: Engine
    config: Config
    batches: Batches
    rows: slice
    order: dict[str, int]
    folder: Path
    ranks: Ranks
    stop: Stop
    tokens: int
    loss: float | None = None
    saved: Path | None = None

    @property
    def steps(self) -> int:
        return self.engine.optimizer.steps

    def run(self, progress: Progress) -> None:
        """To the last step, or to a signal."""
        config = self.config
        while self.steps < config.train.steps:
            args, kwargs = arguments(self.batches.training(self.steps, self.rows))
            loss = self.step(args, kwargs)
            self.loss, signal = self.ranks.mean_and_most(float(loss), self.stop.number)
            done = self.steps
            figures = {}
            if config.validation.every and (done % config.validation.every == 0 or done == config.train.steps) and not signal:
                with progress.paused():
                    figures["validation_loss"] = self.validate()
            progress.update(self.loss, self.tokens, **figures)
            due = config.checkpoint.every and done % config.checkpoint.every == 0
            last = bool(signal) or done == config.train.steps
            if due or last:
                with progress.paused():
                    self.save(wait=last or not config.checkpoint.background)
            if signal:
                raise Stopped(signal)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        return self.engine.step(*args, **kwargs)

    def validate(self) -> float:
        """The mean loss of the held-out batches."""
        count = min(self.config.validation.batches, self.batches.validations)
        total = torch.zeros((), dtype=torch.float64)
        for number in range(count):
            args, kwargs = arguments(self.batches.validation(number, self.rows))
            total += float(_loss(self.engine.evaluate(*args, **kwargs)))
        return self.ranks.mean_and_most(float(total) / count, 0)[0]

    def save(self, *, wait: bool) -> None:
        where = self.folder / CHECKPOINTS
        path = step_folder(where, self.steps)
        if path == self.saved:
            return
        extra = {"train": {"step": self.steps, "samples": self.steps * self.config.train.batch, "order": self.order}}
        self.engine.save(path, extra=extra, wait=wait)
        self.saved = path
        if self.ranks.first:
            prune(where, self.config.checkpoint.keep)
            if self.config.metrics.tensorboard:
                self.write_events()

    def write_events(self) -> None:
        run = read(self.folder)
        assert run.run is not None
        write_events(self.folder / EVENTS, run.metrics, datetime.fromisoformat(run.run["began"]).timestamp())

    def write_report(self) -> None:
        if self.ranks.first and self.config.metrics.report:
            write(self.folder, self.folder / REPORT)


def _loss(out: Any) -> torch.Tensor:
    """The scalar loss in what the model returns."""
    loss = out.get("loss") if isinstance(out, dict) else out if isinstance(out, torch.Tensor) else getattr(out, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise RunError(f"for validation the model returned {type(out).__name__}, which is no scalar loss and has no `loss`")
    return loss
