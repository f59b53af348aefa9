"""What ranks do in the tests of faults."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from scrimp import SGD, Engine
from scrimp.errors import FitError, RunError
from tests.faults.training import Run, batch_of, built
from tests.rank_jobs.elastic import resize

STEPS = 3
Told = dict[str, tuple[dict[str, torch.Tensor], list[float]]]


def _exact() -> Engine:
    optimizer = SGD(lr=1.0, momentum=1.0)
    return Engine(resize.Exact(), optimizer=optimizer, precision="fp32", memory="1GiB", device="cpu", chunk_numel=256)


def _exact_losses(engine: Engine, steps: range) -> list[float]:
    """Means over the ranks."""
    world, rank, losses = dist.get_world_size(), dist.get_rank(), []
    for step in steps:
        loss = engine.step(resize.exact_batch(step).chunk(world)[rank])
        dist.all_reduce(loss)
        losses.append(float(loss / world))
    return losses


def saves(folder: str) -> Told:
    """After some steps: everything that the next step depends on, and the losses of the next steps."""
    exact, gpt = _exact(), resize.built("gpt-tiny", None, "adamw")
    _exact_losses(exact, range(STEPS))
    for step in range(STEPS):
        gpt.step(*resize.shares("gpt-tiny", tuple(range(dist.get_world_size())), step))
    exact.save(Path(folder) / "exact")
    gpt.save(Path(folder) / "gpt")
    return {"gpt-tiny": (resize.whole(gpt), []), "exact": (resize.whole(exact), _exact_losses(exact, range(STEPS, STEPS + 3)))}


def loads(folder: str) -> Told:
    """The same, of what was saved."""
    exact, gpt = _exact(), resize.built("gpt-tiny", None, "adamw", seed=1)
    exact.load(Path(folder) / "exact")
    gpt.load(Path(folder) / "gpt")
    return {"gpt-tiny": (resize.whole(gpt), []), "exact": (resize.whole(exact), _exact_losses(exact, range(STEPS, STEPS + 3)))}


def hashes(folder: str, steps: int) -> list[str]:
    """Of the checkpoints after every second step of a run."""
    run = Run(folder=folder, steps=steps, every=2)
    engine, found = built(run), []
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        engine.step(*batch_of(run, step))
        if (step + 1) % run.every == 0:
            engine.save(Path(folder) / f"{step}")
            manifest = json.loads((Path(folder) / f"{step}" / "manifest.json").read_text())
            found.append(hashlib.sha256(json.dumps(manifest["files"]).encode()).hexdigest())
    return found


def memory_runs_short(folder: str, share: float, on: list[int]) -> tuple[bool, str, bool, list[int]]:
    """In the steady state the budget of the ranks `on` falls to a share of a step's peak, as if another process had taken the
    rest. Whether the losses are those of an engine whose budget did not fall; an error, if there was one; whether the weights are
    then those of before; and the bytes that the engine plans with, before and afterwards."""
    run, rank = Run(folder=folder, steps=9, every=100), dist.get_rank()
    calm, engine = built(run), built(run)

    def step(of: Engine, number: int) -> float:
        torch.manual_seed(100 * number + rank)
        return float(of.step(*batch_of(run, number)))

    wanted = [step(calm, number) for number in range(run.steps)]
    losses = [step(engine, number) for number in range(5)]
    engine.ledger.reset_peak()  # so that the next step is metered
    losses.append(step(engine, 5))
    room = [engine._run.planning.room_nbytes]
    if rank in on:
        engine._run.meter.budget_nbytes = int(share * engine.ledger.peak_nbytes)
    before = {key: value.clone() for key, value in engine.iter_state()}
    engine.ledger.reset_peak()
    dist.barrier()
    try:
        losses += [step(engine, number) for number in range(6, run.steps)]
    except (FitError, RunError) as caught:
        error = f"{type(caught).__name__}: {caught}"
        everyone = len(on) == dist.get_world_size()
        return False, error, everyone and all(torch.equal(value, before[key]) for key, value in engine.iter_state()), room
    return losses == wanted, "", False, [*room, engine._run.planning.room_nbytes]


def warned_under_torchrun(restarts: str, keeps_store: str) -> list[str]:
    """What building an engine warns of where torchrun has started the ranks."""
    env = {"TORCHELASTIC_MAX_RESTARTS": restarts, "TORCHELASTIC_USE_AGENT_STORE": keeps_store}
    with mock.patch.dict(os.environ, env), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _exact().close()
    return [str(each.message) for each in caught]


def slow_rank(seconds: float) -> tuple[list[float], list[float], float]:
    """Rank 1 sleeps before one of the steps: losses, those of a run without that, and the seconds of that step."""
    run = Run(folder="", steps=6, every=100)
    found: list[list[float]] = []
    longest = 0.0
    for slow in (False, True):
        engine = built(run)
        torch.manual_seed(dist.get_rank())
        found.append([])
        for number in range(run.steps):
            dist.barrier()
            began = time.monotonic()
            if slow and number == 4 and dist.get_rank() == 1:
                time.sleep(seconds)
            found[-1].append(float(engine.step(*batch_of(run, number))))
            longest = time.monotonic() - began if slow and number == 4 else longest
    return found[0], found[1], longest
