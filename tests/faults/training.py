"""A training run as users write one: it goes on from the newest checkpoint, saves every few steps, and after SIGTERM saves and
ends with 143. For the tests a rank may kill itself, as told: `python -m tests.faults.training JSON` under torchrun."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scrimp import AdamW, Engine, checkpoint, zoo

TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, kw_only=True)
class Faults:
    """In each of the first `count` attempts one rank kills itself with SIGKILL, at any instant of the first `steps` steps; or so
    many `seconds` on average after the first step, as failures of machines come."""

    count: int
    steps: int = 0
    seconds: float = 0.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """`every`: steps from checkpoint to checkpoint. `least`: seconds that a step takes at least. `tail`: the attempt without a
    fault makes so many steps, however many were made before."""

    folder: str
    steps: int
    every: int
    model: str = "gpt-tiny"
    rows: int = 12
    least: float = 0.0
    tail: int | None = None
    timeout: float = 60.0
    faults: Faults | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Run:
        data = json.loads(text)
        return cls(**{**data, "faults": None if data["faults"] is None else Faults(**data["faults"])})

    @property
    def checkpoints(self) -> Path:
        return Path(self.folder) / "checkpoints"

    @property
    def final(self) -> Path:
        return Path(self.folder) / "final"

    @property
    def log(self) -> Path:
        """A line for each step that rank 0 has made, in any attempt."""
        return Path(self.folder) / "steps.jsonl"

    def last_step(self, begun: int, attempt: int) -> int:
        """Where an attempt that begins at a step ends."""
        count = 0 if self.faults is None else self.faults.count
        return self.steps if self.tail is None or attempt < count else begun + self.tail

    def lines(self) -> list[dict[str, Any]]:
        """A line that a kill cut off is left out."""
        return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("}\n")]


class Doom:
    """Kills this rank at its time, if it is its turn."""

    def __init__(self, faults: Faults | None, rank: int, world: int, attempt: int) -> None:
        self._at: int | None = None
        self._after: float | None = None
        self._last = 0.0
        if faults is None or attempt >= faults.count:
            return
        draw = random.Random(f"{faults.seed} {attempt}")
        if draw.randrange(world) != rank:
            return
        self._share = draw.random()
        if faults.seconds:
            self._after = draw.expovariate(1 / faults.seconds)
        else:
            self._at = draw.randrange(faults.steps)

    def step(self, number: int) -> None:
        """Before the step with this number of the attempt: from 0 on."""
        now = time.monotonic()
        if number == 1 and self._after is not None:
            self._kill(self._after)
        if (number and number == self._at) or self._at == 0 == number:
            self._kill(self._share * (now - self._last if number else 0.1))
        self._last = now

    def _kill(self, seconds: float) -> None:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


class Stop:
    """Whether SIGTERM came, on any rank; all ranks know it after the same step."""

    def __init__(self) -> None:
        self._came = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: object) -> None:
        self._came = True

    def agreed(self) -> bool:
        came = torch.tensor([int(self._came)])
        dist.all_reduce(came, op=dist.ReduceOp.MAX)
        return bool(came)


def built(run: Run) -> Engine:
    torch.manual_seed(0)
    model = zoo.build(run.model, dropout=0.1) if run.model == "gpt-tiny" else zoo.build(run.model)
    return Engine(model, optimizer=AdamW(lr=1e-2), precision="fp32", memory="1GiB", device="cpu", chunk_numel=3000)


def batch_of(run: Run, step: int) -> list[torch.Tensor]:
    """This rank's rows of a global batch."""
    world, rank = dist.get_world_size(), dist.get_rank()
    return [tensor.chunk(world)[rank] for tensor in zoo.example_batch(run.model, batch=run.rows, step=step)]


def steps_of(run: Run, engine: Engine, doom: Doom, attempt: int) -> Iterator[int]:
    """Trains; gives the number of steps made after each."""
    begun = engine.optimizer.steps
    for number, step in enumerate(range(begun, run.last_step(begun, attempt))):
        doom.step(number)
        began = time.time()
        loss = float(engine.step(*batch_of(run, step)))
        time.sleep(max(0.0, began + run.least - time.time()))
        if dist.get_rank() == 0:
            line = {"attempt": attempt, "step": step, "began": began, "ended": time.time(), "loss": loss.hex()}
            with run.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
        yield step + 1


def train(text: str) -> None:
    """In an initialised process group, to the end."""
    run = Run.from_json(text)
    rank, world, attempt = dist.get_rank(), dist.get_world_size(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    stop = Stop() if threading.current_thread() is threading.main_thread() else None
    engine, doom = built(run), Doom(run.faults, rank, world, attempt)
    newest = checkpoint.latest(run.checkpoints)
    torch.manual_seed(rank)  # of dropout
    if newest is not None:
        engine.load(newest)
    for step in steps_of(run, engine, doom, attempt):
        ends = stop is not None and stop.agreed()
        if ends or step % run.every == 0:
            engine.save(checkpoint.step_folder(run.checkpoints, step))
            if rank == 0:
                checkpoint.prune(run.checkpoints, keep=2)
        if ends:
            sys.exit(TERMINATED)
    engine.save(run.final)
    engine.close()


def alone(text: str) -> None:
    """A rank's whole life, under torchrun or with its environment."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=Run.from_json(text).timeout))
    train(text)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    alone(sys.argv[1])
