"""The jobs of `scrimp demo`'s processes: plain PyTorch under the profiler, and the engine within a budget.

The profiler's memory events come from torch's allocator, so they check the ledger independently.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from scrimp.chunks import AdamW
from scrimp.engine import Engine, Memory, Progress
from scrimp.errors import ScrimpError
from scrimp.zoo import GPT, GPTConfig, Grammar

BETAS = (0.9, 0.95)
PLAIN_STEPS = 3
STEADY = 3  # steps after which the engine has traced and follows its schedule
DOOMED_SECONDS = 60.0

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, its text and how long it is trained; `batch` is the global one."""

    vocab: int = 64
    seq: int = 64
    dim: int = 160
    heads: int = 5
    layers: int = 6
    batch: int = 16
    lr: float = 2e-3
    steps: int = 80
    seed: int = 0

    @property
    def saved(self) -> int:
        """The step after which the checkpoint is written."""
        return max(STEADY + 2, self.steps * 2 // 5)

    @property
    def killed(self) -> int:
        """The step after which the ranks are killed, or a few more."""
        return self.saved + max(2, self.steps // 5)

    def model(self) -> GPT:
        torch.manual_seed(self.seed)
        return GPT(GPTConfig(vocab=self.vocab, seq=self.seq, dim=self.dim, heads=self.heads, layers=self.layers))

    def grammar(self) -> Grammar:
        return Grammar(self.vocab, self.seed)

    def rate(self, step: int) -> float:
        """Learning rate: rises over the first tenth, falls over the last two fifths."""
        return self.lr * min(1.0, (step + 1) * 10 / self.steps, (self.steps - step) * 2.5 / self.steps)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """The cost of plain PyTorch, and facts about model and text."""

    parameters: int
    peak_nbytes: int
    seconds: float
    entropy: float
    unigram_entropy: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """`measured`: the profiled step. A doomed run saves a checkpoint and waits at its end to be killed; another one starts from
    the checkpoint."""

    name: str
    folder: str
    budget_nbytes: int
    measured: int
    doomed: bool
    accumulate: int = 1
    quiet: bool = False

    @property
    def metrics(self) -> Path:
        return Path(self.folder) / "metrics.jsonl"

    @property
    def checkpoint(self) -> Path:
        return Path(self.folder) / "checkpoint"

    def figures(self, rank: int) -> Path:
        return Path(self.folder) / f"{self.name}-figures-{rank}.json"

    def pid(self, rank: int) -> Path:
        return Path(self.folder) / f"{self.name}-pid-{rank}"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Measurements of one rank. `metered_nbytes` and `step_peak_nbytes` are of the profiled step: by the profiler and by the
    ledger."""

    budget_nbytes: int
    peak_nbytes: int
    step_peak_nbytes: int
    metered_nbytes: int
    host_nbytes: int
    up_nbytes: int
    least_up_nbytes: int
    down_nbytes: int
    least_down_nbytes: int
    seconds: float
    least_seconds: float


def profiled_peak(work: Callable[[], object]) -> int:
    """The most bytes live at once of those that `work` allocated, by the profiler's memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        work()
    return most_live(seen)


def most_live(seen: Any) -> int:
    """The same, of a profile with memory events."""
    live = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def share(setting: Setting, grammar: Grammar, step: int) -> Batch:
    """This rank's rows of a global batch; cloned, because a view would keep all of it in memory."""
    tokens, targets = grammar.batch(setting.batch, setting.seq, step)
    world, rank = dist.get_world_size(), dist.get_rank()
    return tokens.chunk(world)[rank].clone(), targets.chunk(world)[rank].clone()


def plain(setting: Setting) -> Plain:
    """Trains a few steps with plain PyTorch, on this rank's share of the batches, without communication."""
    grammar = setting.grammar()
    batches = [share(setting, grammar, step) for step in range(PLAIN_STEPS)]
    parameters = sum(parameter.numel() for parameter in setting.model().parameters())

    def steps() -> float:
        model = setting.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, betas=BETAS, fused=True)
        start = 0.0
        for number, (tokens, targets) in enumerate(batches):
            if number == 1:  # the first step makes the optimizer states
                start = time.perf_counter()
            model(tokens, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - start) / (PLAIN_STEPS - 1)

    given = sum(tensor.nbytes for tensor in batches[0])
    return Plain(
        parameters=parameters,
        peak_nbytes=profiled_peak(steps) + given,
        seconds=steps(),
        entropy=grammar.entropy,
        unigram_entropy=grammar.unigram_entropy,
    )


def train(setting: Setting, run: Run) -> None:
    """Trains within the budget, from the start or from the checkpoint. It writes its measurements to files, because the process
    may be killed."""
    world, rank = dist.get_world_size(), dist.get_rank()
    run.pid(rank).write_text(str(os.getpid()))
    grammar = setting.grammar()
    engine = Engine(
        setting.model(),
        optimizer=AdamW(lr=setting.rate, betas=BETAS),
        memory=Memory(device=run.budget_nbytes),
        precision="fp32",
        micro_batches=run.accumulate,
        device="cpu",
    )
    if not run.doomed:
        engine.load(run.checkpoint)
    began = engine.optimizer.steps
    seconds: list[float] = []
    console = Console(markup=False, highlight=False)
    with Progress(engine, steps=setting.steps, metrics=run.metrics, quiet=run.quiet, console=console) as progress:
        for step in range(began, setting.steps):
            batch = share(setting, grammar, step)
            if step == run.measured:
                loss, figures = _measured(engine, batch, median(seconds))
                run.figures(rank).write_text(json.dumps(asdict(figures)))
            else:
                loss = engine.step(*batch)
                if step >= began + STEADY:
                    seconds.append(engine._run.seconds)
            dist.all_reduce(loss)
            progress.update(loss / world, tokens=setting.batch * setting.seq)
            if run.doomed and engine.optimizer.steps == setting.saved:
                engine.save(run.checkpoint)
        if run.doomed:
            time.sleep(DOOMED_SECONDS)
            raise ScrimpError("nobody killed this rank")


def _measured(engine: Engine, batch: Batch, seconds: float) -> tuple[torch.Tensor, Figures]:
    """A step under the profiler, plus the bytes allocated before it, which the profiler does not see."""
    bound = engine.bound()
    before = engine.ledger.total_nbytes + sum(tensor.nbytes for tensor in batch)
    peak = engine.ledger.peak_nbytes
    engine.ledger.reset_peak()
    losses: list[torch.Tensor] = []
    engine._run.wait()  # an update overlapped with the step frees storages that were allocated before the profiler started
    gc.collect()
    most = profiled_peak(lambda: losses.append(engine.step(*batch)))
    figures = Figures(
        budget_nbytes=engine._run.budget.device_nbytes,
        peak_nbytes=max(peak, engine.ledger.peak_nbytes),
        step_peak_nbytes=engine.ledger.peak_nbytes,
        metered_nbytes=most + before,
        host_nbytes=engine._run.store.host_nbytes(),
        up_nbytes=bound.up_nbytes,
        least_up_nbytes=bound.least_up_nbytes,
        down_nbytes=bound.down_nbytes,
        least_down_nbytes=bound.least_down_nbytes,
        seconds=seconds,
        least_seconds=bound.least_seconds,
    )
    return losses[0], figures
