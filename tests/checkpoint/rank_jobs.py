"""What ranks do in the tests of saves in the background."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from scrimp import zoo
from scrimp.checkpoint import _agree, _write
from scrimp.chunks.tables.optimizers import AdamW
from scrimp.engine import Engine, Memory
from scrimp.errors import CheckpointError
from scrimp.ext import hf
from tests.rank_jobs import planned_engine


def made(name: str, settings: dict) -> Engine:
    torch.manual_seed(0)
    return Engine(zoo.build(name), optimizer=AdamW(lr=1e-2), memory=Memory(device="1GiB"), device="cpu", **settings)


def train(engine: Engine, name: str, steps: range) -> None:
    for step in steps:
        batch = zoo.example_batch(name, batch=8, step=step)
        engine.step(*(tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in batch))


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """Every write of a tensor waits for the event, for a minute at most."""
    go, real = threading.Event(), _write.ShardFile.append

    def append(self: _write.ShardFile, tensor: str, part: torch.Tensor) -> None:
        go.wait(60)
        real(self, tensor, part)

    with patch.object(_write.ShardFile, "append", append):
        yield go


def save_beside_training(name: str, settings: dict, folder: str) -> None:
    """Saves, waiting and not, from the same state; training goes on while the second is held up."""
    engine = made(name, settings)
    train(engine, name, range(3))
    engine.save(Path(folder) / "want")
    with held_up() as go:
        engine.save(Path(folder) / "ckpt", wait=False)
        train(engine, name, range(3, 5))
        assert not (Path(folder) / "ckpt").exists()
        go.set()
        engine.close()
    assert (Path(folder) / "ckpt" / "manifest.json").exists()


def save_under_a_plan(plan: str, name: str, rows: int, folder: str) -> None:
    """As `save_beside_training`."""
    engine = planned_engine.engine_of(plan, name, {})
    for step in range(2):
        planned_engine.stepped(engine, name, {}, rows, step)
    engine.save(Path(folder) / "want")
    with held_up() as go:
        engine.save(Path(folder) / "ckpt", wait=False)
        for step in range(2, 4):
            planned_engine.stepped(engine, name, {}, rows, step)
        go.set()
        engine.close()


def fail_on(name: str, failing: int, folder: str) -> tuple[int, str, int]:
    """One rank's disk is full. Returns the step that raised, what it said, and how many steps were made in the end."""
    engine = made(name, {})
    train(engine, name, range(1))
    engine.save(Path(folder) / "first")
    if dist.get_rank() == failing:

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        with patch.object(_write.os, "pwrite", full):
            engine.save(Path(folder) / "ckpt", wait=False)
            assert engine._run.saves._running is not None
            if failing:
                while not (Path(folder) / "ckpt.unfinished").exists() and engine._run.saves._running.thread.is_alive():
                    pass
            engine._run.saves._running.thread.join()
    else:
        engine.save(Path(folder) / "ckpt", wait=False)
    raised, words, step = -1, "", 1
    while step < 6:
        try:
            train(engine, name, range(step, step + 1))
            step += 1
        except CheckpointError as error:
            assert raised < 0
            raised, words = step, str(error)
    engine.save(Path(folder) / "ckpt", wait=False)
    engine.close()
    return raised, words, engine.optimizer.steps


def one_never_writes(name: str, folder: str) -> str:
    """Rank 1 is stuck in its first write. Rank 0 gives up after a while, and says who is late."""
    engine = made(name, {})
    with patch.object(_agree, "group_timeout", lambda *_: timedelta(seconds=1)):
        if dist.get_rank():
            with held_up() as go:
                engine.save(Path(folder) / "ckpt", wait=False)
                dist.barrier()
                go.set()
                words = closed(engine)
        else:
            engine.save(Path(folder) / "ckpt", wait=False)
            words = closed(engine)
            dist.barrier()
    return words


def one_reads_late(name: str, folder: str, wait: bool) -> float:
    """When the save has ended, by a clock that both processes have. Rank 1 reads the outcome late."""
    engine = made(name, {})
    real = _agree.Agreement._await

    def late(self: _agree.Agreement, key: str, timeout: timedelta, words: str) -> bytes:
        if key == "outcome":
            time.sleep(0.5)
        found = real(self, key, timeout, words)
        if key == "outcome":
            read.append(time.monotonic())
        return found

    read: list[float] = []
    with patch.object(_agree.Agreement, "_await", late):
        engine.save(Path(folder) / "ckpt", wait=wait)
        engine.close()
    return read[0] if read else time.monotonic()


def closed(engine: Engine) -> str:
    try:
        engine.close()
    except CheckpointError as error:
        return str(error)
    return ""


def exports(name: str, plan: str | None, folder: str) -> None:
    engine = made(name, {}) if plan is None else planned_engine.engine_of(plan, name, {})
    if plan is None:
        train(engine, name, range(2))
    hf.export(engine, Path(folder) / "one.safetensors", dtype="fp32")
    state = engine.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, Path(folder) / "state.pt")
        os.mkdir(Path(folder) / "one")
        (Path(folder) / "one" / "notes.txt").write_text("mine")
    dist.barrier()
    with pytest.raises(CheckpointError, match="is not an empty folder"):
        hf.export(engine, Path(folder) / "one", files_from=folder)
    engine.close()


def save_dcp(name: str, folder: str) -> None:
    """Every parameter in halves, by DTensor."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    torch.manual_seed(0)
    mesh = DeviceMesh("cpu", [*range(dist.get_world_size())])
    state = {key: distribute_tensor(value, mesh, [Shard(0)]) for key, value in zoo.build(name).state_dict().items()}
    dcp.save({"model": state}, checkpoint_id=folder)
