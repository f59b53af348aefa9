"""`scrimp demo`: trains a small GPT within a memory budget that plain PyTorch exceeds, on two processes; kills them, and resumes
on one. Every number is measured in this run."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from scrimp.cli.demo import planned
from scrimp.cli.demo.closing_table import closing, table
from scrimp.cli.demo.train import Figures, Plain, Run, Setting, plain, train
from scrimp.cli.render.curve import curve
from scrimp.errors import ScrimpError
from scrimp.ext.ranks import RankFailure, RankPool, RankTimeout
from scrimp.ledger import format_nbytes
from scrimp.report import read_metrics

WORLD = 2
FIRST_SHARE, SECOND_SHARE = 3, 4  # divisors of plain PyTorch's peak for the budgets of the two runs: a third, then a quarter
FULL = Setting()
LEAST_STEPS = 10
TIMEOUT_SECONDS = 600.0
POLL_SECONDS = 0.02
LAST = 10
KILLED = f"died with exit code {-signal.SIGKILL}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The measurements. `before` and `after`: the losses by step of the killed run and of the resumed one."""

    setting: Setting
    plain: Plain
    first: Figures
    second: Figures
    before: Mapping[int, float]
    after: Mapping[int, float]

    @property
    def repeated(self) -> list[int]:
        return sorted(self.before.keys() & self.after.keys())

    def broken(self) -> list[str]:
        """The promises that this run broke."""
        found = []
        for name, figures in (("on two ranks", self.first), ("resumed", self.second)):
            for meter, peak in (("ledger", figures.peak_nbytes), ("profiler", figures.metered_nbytes)):
                if peak > figures.budget_nbytes:
                    found.append(f"{name} the peak is {peak:,} bytes by the {meter}; the budget is {figures.budget_nbytes:,}")
        if not self.repeated:
            found.append("no step was made both before the kill and after the resume")
        found += [
            f"the loss of step {step} was {self.before[step]!r} before the kill and {self.after[step]!r} after the resume"
            for step in self.repeated
            if self.before[step] != self.after[step]
        ]
        return found


def demo(console: Console, *, steps: int = FULL.steps, seed: int = 0, quiet: bool = False) -> list[str]:
    """Runs the whole tour; returns the promises it broke."""
    if steps < LEAST_STEPS:
        raise ScrimpError(f"{steps} steps are too few to trace, save, be killed and resume in: use {LEAST_STEPS} or more")
    setting = Setting(**{**FULL.__dict__, "steps": steps, "seed": seed})
    began = time.monotonic()
    outcome = tour(console, setting, quiet=quiet)
    broken = outcome.broken()
    if not quiet:
        heading(console, 5, "What it took", "Bytes of the busiest rank, exact, of this run; traffic and times of rank 0.")
    console.print(table(outcome.plain, outcome.first, outcome.second))
    if not quiet:
        text = (
            f"scrimp.plan splits every operator of another small GPT over {planned.WORLD} ranks so that the peak is least, and "
            "Engine(model, plan=plan) runs it. Beside it: data parallelism, as a plan of the same memory model."
        )
        heading(console, 6, f"Plans that run, on {planned.WORLD} ranks", text)
    with _hushed(), _ranks(planned.WORLD) as ranks:
        ran = planned.planned(ranks, seed)
    planned.show(console, ran)
    broken += planned.broken(ran)
    if not quiet:
        console.print(closing(time.monotonic() - began), soft_wrap=True)
    for promise in broken:
        console.print(f"broken promise: {promise}", style="bold red", soft_wrap=True)
    return broken


def tour(console: Console, setting: Setting, *, quiet: bool) -> Outcome:
    words = Console(quiet=True) if quiet else console
    with tempfile.TemporaryDirectory(prefix="scrimp-demo-") as folder, _hushed(), _cursor(words):
        with _ranks(WORLD) as ranks:
            known = max(ranks.run(plain, setting), key=lambda one: one.peak_nbytes)
            budgets = [known.peak_nbytes // share for share in (FIRST_SHARE, SECOND_SHARE)]
            first = Run(
                name="first", folder=folder, budget_nbytes=budgets[0], measured=setting.saved - 1, doomed=True, quiet=quiet
            )
            _say_plain(words, setting, known, budgets[0])
            _say_first(words, budgets[0])
            _until_killed(ranks, setting, first)
        before = read_metrics(first.metrics)
        second = Run(
            name="second", folder=folder, budget_nbytes=budgets[1], measured=setting.steps - 1, doomed=False,
            accumulate=WORLD, quiet=quiet,
        )  # fmt: skip
        _say_second(words, setting, len(before), budgets[1])
        with _ranks(1) as ranks:
            ranks.run(train, setting, second)
        after = read_metrics(second.metrics)
        outcome = Outcome(
            setting=setting,
            plain=known,
            first=_figures(first, WORLD, before),
            second=_figures(second, 1, after),
            before=_losses(before),
            after={step: loss for step, loss in _losses(after).items() if step >= setting.saved},
        )
    _say_losses(words, outcome, [row["loss"] for row in after], len(before))
    return outcome


def heading(console: Console, number: int, title: str, text: str) -> None:
    console.print(f"\n{number}  {title}", style="bold")
    console.print(text)


def _say_plain(console: Console, setting: Setting, known: Plain, budget: int) -> None:
    text = (
        f"{setting.layers} layers, {known.parameters:,} parameters, {format_nbytes(4 * known.parameters)} in fp32. The text "
        f"comes from a random grammar (seed {setting.seed}): no model can do better than its entropy, {known.entropy:.4f} nats "
        f"a token. Knowing only how often each word occurs gives {known.unigram_entropy:.4f}."
    )
    heading(console, 1, "A small GPT, and a text whose entropy is known", text)
    text = (
        'The "device" of this tour is a budget on CPU memory: every storage that an operator makes counts. The budget is '
        f"1/{FIRST_SHARE} of what plain PyTorch takes for a rank's share of the batch: weights, gradients, AdamW states and "
        "activations, all fp32. Its peak, by the profiler's memory events over real steps:"
    )
    heading(console, 2, "Plain PyTorch breaks the budget", text)
    over = known.peak_nbytes / budget
    console.print(f"  plain peak   {known.peak_nbytes:>13,} bytes   OVER, {over:.2f} times the budget", style="red")
    console.print(f"  budget       {budget:>13,} bytes")


def _say_first(console: Console, budget: int) -> None:
    text = (
        f"scrimp.Engine(model, memory=scrimp.Memory(device={budget})), in fp32 too, in {WORLD} processes on gloo, each "
        "on its share of the batches:"
    )
    heading(console, 3, f"scrimp within the budget, on {WORLD} ranks", text)


def _say_second(console: Console, setting: Setting, killed: int, budget: int) -> None:
    text = (
        f"A checkpoint was saved after step {setting.saved}; after step {killed} both ranks got SIGKILL. The run goes on from "
        f"the checkpoint on 1 rank in place of {WORLD}, within 1/{SECOND_SHARE} of plain's peak, {format_nbytes(budget)}:"
    )
    heading(console, 4, "Killed, and resumed", text)


def _say_losses(console: Console, outcome: Outcome, losses: Sequence[float], killed: int) -> None:
    steps = outcome.repeated
    equal = [step for step in steps if outcome.before[step] == outcome.after[step]]
    console.print(
        f"The steps from {outcome.setting.saved + 1} to {killed} were made twice, before the kill on {WORLD} ranks and after "
        f"it on 1: {len(equal)} of {len(steps)} losses are equal to the last bit."
    )
    for step in (*steps[:1], *steps[1:][-1:]):
        console.print(f"  step {step + 1:<4} {outcome.before[step]!r:<20} {outcome.after[step]!r}")
    last = losses[-LAST:]
    console.print(
        f"\nThe loss over both runs, in nats a token; the mean of the last {len(last)} steps is {sum(last) / len(last):.4f}, "
        f"the floor {outcome.plain.entropy:.4f}:"
    )
    marks = [(outcome.setting.saved - 1, "saved"), (killed - 1, "killed")]
    for line in curve(losses, outcome.plain.entropy, marks):
        console.print(line, soft_wrap=True)


def _until_killed(ranks: RankPool, setting: Setting, run: Run) -> None:
    """Trains, and from another thread kills every rank once enough steps are done."""
    over = threading.Event()
    killer = threading.Thread(target=_kill, args=(run, setting.killed, over), daemon=True)
    killer.start()
    try:
        ranks.run(train, setting, run)
    except RankFailure as failure:
        if all(KILLED in text for text in failure.failures.values()) and run.metrics.exists():
            return
        raise
    finally:
        over.set()
        killer.join()
    raise ScrimpError("the demo stopped: the ranks ended before they were killed")


def _kill(run: Run, steps: int, over: threading.Event) -> None:
    while not over.wait(POLL_SECONDS):
        if run.metrics.exists() and len(read_metrics(run.metrics)) >= steps:
            for rank in range(WORLD):
                os.kill(int(run.pid(rank).read_text()), signal.SIGKILL)
            return


def _figures(run: Run, world: int, rows: Sequence[Mapping[str, Any]]) -> Figures:
    """Rank 0's figures, with the highest peaks and host bytes of any rank; the ledger's peak also covers steps after the profiled
    one."""
    every = [json.loads(run.figures(rank).read_text()) for rank in range(world)]
    most = {key: max(one[key] for one in every) for key in ("peak_nbytes", "host_nbytes")}
    later = [row["device_peak_nbytes"] for row in rows if row["step"] >= run.measured]
    return Figures(**{**every[0], **most, "peak_nbytes": max([most["peak_nbytes"], *later])})


def _losses(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows}


@contextmanager
def _ranks(world: int) -> Iterator[RankPool]:
    try:
        with RankPool(world, timeout_seconds=TIMEOUT_SECONDS) as ranks:
            yield ranks
    except (RankFailure, RankTimeout) as error:
        raise ScrimpError(f"the demo stopped: {error}") from error
    except OSError as error:
        raise ScrimpError(f"the demo stopped: {world} processes could not be started or reached ({error})") from error


@contextmanager
def _hushed() -> Iterator[None]:
    """Silences the ranks' profiler, which writes to stderr unless the environment forbids it."""
    name = "KINETO_LOG_LEVEL"
    ours = name not in os.environ
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if ours:
            del os.environ[name]


@contextmanager
def _cursor(console: Console) -> Iterator[None]:
    """Restores the cursor: a rank killed while its progress line is live leaves the terminal without one."""
    try:
        yield
    finally:
        console.show_cursor(True)
