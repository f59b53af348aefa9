"""Progress of a run: a live line on a terminal, plain lines elsewhere, and a metrics file.

Only rank 0 shows and writes. The loss may still be computing on the device. The host waits for it only where it needs the value:
at every step for a metrics file, else when it draws a line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Column

from scrimp.engine.observe.record import Recorder
from scrimp.errors import RunError
from scrimp.move import received_nbytes
from scrimp.report import MetricsFile, StepLine

if TYPE_CHECKING:
    from scrimp.engine._engine import Engine

DRAW_SECONDS, LINE_SECONDS, LINES = 0.1, 10.0, 10  # on a terminal; elsewhere at least that often, and that many lines per run
OWN = {
    "step", "seconds", "tokens_per_second", "device_peak_nbytes", "host_nbytes", "up_nbytes", "down_nbytes", "skipped", "lr",
    "mfu",
}  # fmt: skip
WINDOW = 20  # steps over which speed and the time to go are averaged


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One step, as the engine's counters show it. Steps count from 0."""

    step: int
    loss: torch.Tensor | float
    seconds: float
    tokens: int
    device_nbytes: int
    device_peak_nbytes: int
    host_nbytes: int
    up_nbytes: int
    down_nbytes: int
    skipped: int
    lr: float | None
    received_nbytes: int | None  # from other ranks; None if there are none
    disk: dict[str, float | str]  # empty if no disk is used
    save_waited_seconds: float | None  # of updates, for a save in the background; None if there was none
    mfu: float | None = None
    more: dict[str, float] = field(default_factory=dict)  # the user's figures


class Progress:
    """`with scrimp.Progress(engine, steps=1000, metrics="run.jsonl") as progress:`, then `progress.update(loss, tokens)`
    after each step. `steps` counts from the very first, so a resumed run goes on where it was; `tokens` are the step's,
    over all ranks; `quiet` shows nothing but still writes the metrics. `run`: a folder for all that `scrimp report` shows, the
    metrics among it. At the end the machine is measured for it, once per process, for up to three seconds.

    `every`: steps between lines where the output is no terminal. `flops`: of the model in a step, over all ranks, and
    `flops_per_second` of all devices together: with both there is an MFU. `progress.update(loss, tokens, name=figure)` adds your
    own figures to the line and the metrics. What runs in a `with progress.paused():` block, such as an evaluation, does not count
    into the seconds of a step.

    >>> import scrimp
    >>> from scrimp import zoo
    >>> engine = scrimp.Engine(zoo.build("gpt-tiny"), memory="1GiB", device="cpu")
    >>> with scrimp.Progress(engine, steps=2, metrics="run.jsonl", quiet=True) as progress:
    ...     for step in range(2):
    ...         progress.update(engine.step(*zoo.example_batch("gpt-tiny", batch=8, step=step)), tokens=8 * 32)
    >>> [row["step"] for row in scrimp.read_metrics("run.jsonl")]
    [0, 1]
    >>> engine.close()
    """

    def __init__(
        self,
        engine: Engine,
        *,
        steps: int | None = None,
        metrics: str | Path | None = None,
        run: str | Path | None = None,
        quiet: bool = False,
        every: int | None = None,
        flops: float | None = None,
        flops_per_second: float | None = None,
        console: Console | None = None,
    ) -> None:
        self.engine = engine._run
        self.steps = steps
        first = self.engine.wire.rank == 0 and not self.engine.group.outside
        self.console = (console or Console(stderr=True)) if first and not quiet else None
        if run is not None and metrics is not None:
            raise RunError("a run folder has a metrics file already: give Progress either run or metrics")
        self._every = every
        self._least_seconds = flops / flops_per_second if flops and flops_per_second else None  # of a step, at the full rate
        self._path = metrics if first else None
        self._folder = run if first else None
        self._recorder: Recorder | None = None
        self._file: MetricsFile | None = None
        self._bar: Bar | None = None
        self._last: Reading | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._first = True
        self._began: float | None = None  # of the step in progress
        self._shown: tuple[float, int] | None = None  # when, and how many steps were done

    def __enter__(self) -> Progress:
        if self._folder is not None:
            self._recorder = Recorder(self.engine, self._folder)
            self._path = self._recorder.folder.metrics
        if self._path is not None:
            self._file = MetricsFile(self._path, self.engine.steps)
        if self.console is not None and self.console.is_terminal:
            text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=False))
            self._bar = Bar(BarColumn(bar_width=16), text, console=self.console, auto_refresh=False)
            self._task = self._bar.add_task(f"step {self.engine.steps}", total=self.steps, completed=self.engine.steps)
            self._bar.start()
        self._count_traffic()
        self._began = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None and self._last is not None and self._shown is not None and self._shown[1] != self._last.step + 1:
            self._show(self._last)
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()
        if self._recorder is not None:
            self._recorder.close(measure=error is None)
        self._began = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time of this block belongs to no step."""
        start = perf_counter()
        try:
            yield
        finally:
            if self._began is not None:
                self._began += perf_counter() - start

    def update(self, loss: torch.Tensor | float, tokens: int = 0, **figures: float) -> None:
        """Record a finished step with its loss, and figures of your own."""
        if self._began is None:
            raise RunError(
                "progress.update() outside of its block: write `with scrimp.Progress(engine) as progress:` around the loop"
            )
        if self.console is None and self._file is None:
            return
        if figures.keys() & OWN:
            raise RunError(
                f"progress.update({', '.join(sorted(figures.keys() & OWN))}=...): the metrics have a figure of that name"
            )
        now = perf_counter()
        reading = self._read(loss, tokens, now - self._began, figures)
        self._began = now
        if len(self._recent) == 1 and self._first:
            self._recent.clear()  # drop the first step, which traces and warms up, once there is another
            self._first = False
        self._last = reading
        self._recent.append((reading.seconds, tokens))
        if self._file is not None:
            self._file.write(_row(reading))
        if self._recorder is not None:
            self._recorder.step()
        if self.console is not None and self._is_due(now, reading.step + 1):
            self._show(reading)

    def _read(self, loss: torch.Tensor | float, tokens: int, seconds: float, figures: dict[str, float]) -> Reading:
        engine, step = self.engine, self.engine.steps - 1
        before = self._traffic
        self._count_traffic()
        up, down, read, written, received = (after - b for after, b in zip(self._traffic, before, strict=True))
        lr = engine.rules.groups(step)[0].lr
        return Reading(
            step=step,
            loss=loss.detach() if isinstance(loss, torch.Tensor) else loss,
            seconds=seconds,
            tokens=tokens,
            device_nbytes=engine.ledger.total_nbytes,
            device_peak_nbytes=engine.ledger.peak_nbytes,
            host_nbytes=engine.store.host_nbytes(),
            up_nbytes=up,
            down_nbytes=down,
            skipped=engine.skipped,
            lr=float(lr) if isinstance(lr, (int, float)) else None,
            received_nbytes=received if engine.wire.world > 1 else None,
            disk=engine.store.spill.figures(read, written),
            save_waited_seconds=engine.saves.lap(),
            mfu=None if self._least_seconds is None else self._least_seconds / max(seconds, 1e-9),
            more=figures,
        )

    def _count_traffic(self) -> None:
        traffic = self.engine.store.traffic
        there = (traffic.up_nbytes, traffic.down_nbytes, traffic.read_nbytes, traffic.written_nbytes)
        self._traffic = (*there, received_nbytes())

    def _is_due(self, now: float, done: int) -> bool:
        if self._shown is None or done == self.steps:
            return True
        when, before = self._shown
        if self._bar is not None:
            return now - when >= DRAW_SECONDS
        if self._every is not None:
            return done % self._every == 0
        crossed = self.steps is not None and done * LINES // max(self.steps, 1) != before * LINES // max(self.steps, 1)
        return crossed or now - when >= LINE_SECONDS

    def _show(self, reading: Reading) -> None:
        assert self.console is not None
        assert self._began is not None
        done = reading.step + 1
        self._shown = (self._began, done)
        text = self._text(reading, done)
        if self._bar is None:
            self.console.print(text, soft_wrap=True, markup=False, highlight=False)
        else:
            self._bar.update(self._task, description=text, completed=done, refresh=True)

    def _text(self, reading: Reading, done: int) -> str:
        seconds = sum(seconds for seconds, _ in self._recent) or 1e-9
        tokens = sum(tokens for _, tokens in self._recent)
        each = seconds / len(self._recent)
        return str(
            StepLine(
                done=done,
                steps=self.steps,
                loss=float(reading.loss),
                skipped=reading.skipped,
                tokens_per_second=tokens / seconds if tokens else None,
                mfu=None if self._least_seconds is None else self._least_seconds / each,
                seconds_left=None if self.steps is None else max(self.steps - done, 0) * each,
                device_nbytes=(reading.device_nbytes, reading.device_peak_nbytes, self.engine.budget.device_nbytes),
                host_nbytes=reading.host_nbytes,
                up_nbytes=reading.up_nbytes,
                down_nbytes=reading.down_nbytes,
                more=reading.more,
            )
        )


def _row(reading: Reading) -> dict[str, object]:
    row: dict[str, object] = {
        "step": reading.step,
        "loss": float(reading.loss),
        "seconds": reading.seconds,
        "tokens_per_second": reading.tokens / max(reading.seconds, 1e-9) if reading.tokens else None,
        "device_peak_nbytes": reading.device_peak_nbytes,
        "host_nbytes": reading.host_nbytes,
        "up_nbytes": reading.up_nbytes,
        "down_nbytes": reading.down_nbytes,
        "skipped": reading.skipped,
        **reading.disk,
    }
    more = {
        "lr": reading.lr,
        "received_nbytes": reading.received_nbytes,
        "save_waited_seconds": reading.save_waited_seconds,
        "mfu": reading.mfu,
        **reading.more,
    }
    return {**row, **{name: value for name, value in more.items() if value is not None}}
