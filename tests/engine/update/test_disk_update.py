"""The update of layers on disk, beside the step: the bits of the host's, within the host's budget, whatever the size of
tiles; and whatever goes wrong in its threads ends training with its cause, never in a hang."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp import zoo
from scrimp.chunks.spill.file import SpillFile
from scrimp.chunks.store.placement import DISK
from scrimp.chunks.tables.optimizers import SGD, AdamW
from scrimp.engine import Engine, Memory
from scrimp.engine.observe.progress import Progress
from scrimp.errors import CheckpointError, RunError
from scrimp.ext.ranks import pool
from scrimp.report import read_metrics
from tests.chunks.spill.test_file import ROOT
from tests.engine.test_engine import LR, assert_same
from tests.rank_jobs import engine as jobs

SHAPE = {"layers": 3, "dim": 36, "vocab": 61, "seq": 29}  # parameters that end in the middle of a vector
STEPS = 6
MODES: dict[str, dict[str, Any]] = {"clipped": {"clip_norm": 0.5}, "unclipped": {"skip_nonfinite": False}}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small layer has many."""
    for name in ("spill.file.BLOCK", "store.disk_tier.BLOCK", "spill.queue.REQUEST"):
        monkeypatch.setattr(f"scrimp.chunks.{name}", 4096)


def batch(step: int) -> Any:
    return zoo.example_batch("gpt-tiny", batch=2, step=step, **SHAPE)


def engine_for(folder: Path | None, host: int | str = "auto", state: str = "fp32", **settings: Any) -> Engine:
    torch.manual_seed(0)
    memory = Memory(device="1GiB", host=host, disk=folder)
    optimizer = AdamW(lr=LR, state=state)
    engine = Engine(zoo.build("gpt-tiny", **SHAPE), optimizer=optimizer, memory=memory, device="cpu", **settings)
    engine._run.planning._on_device = frozenset()  # homes stay where they are
    return engine


@cache
def host_for(share: float, precision: str = "bf16", state: str = "fp32") -> int:
    """Between all masters and states on disk and all on the host."""
    engine = engine_for(None, precision=precision, state=state)
    rows = [engine._run.store.placement_nbytes(k) for k in range(len(engine._run.store.placements))]
    least = sum(row[0] + row[1] for row in rows) + max(row[2] for row in rows)
    return int(least + share * (sum(map(sum, rows)) - least))


def file_of(engine: Engine, path: str) -> SpillFile:
    file = engine._run.store.placements[[layer.path for layer in engine._run.store.table.layers].index(path)].file
    assert file is not None
    return file


def on_disk(engine: Engine) -> int:
    return sum(
        engine._run.store.placement_nbytes(k)[2]
        for k, placement in enumerate(engine._run.store.placements)
        if placement.tier == DISK
    )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("precision", "state", "tile", "share", "kernel"),
    [
        ("bf16", "fp32", 1024, 0.0, True),
        ("bf16", "fp32", 4096, 0.6, False),
        ("fp32", "fp32", 2048, 0.0, False),
        ("fp32", "fp32", 1 << 22, 0.6, True),
        ("bf16", "int8", 1024, 0.0, True),
        ("fp32", "int8", 2048, 0.6, False),
    ],
)
def test_the_bits_of_the_host(
    mode: str, precision: str, state: str, tile: int, share: float, kernel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scrimp.chunks.store.disk_tier.TILE", tile)
    want = engine_for(None, precision=precision, state=state, **MODES[mode])
    host = host_for(share, precision, state)
    engine = engine_for(tmp_path, host, precision=precision, state=state, **MODES[mode])
    if not kernel:
        engine._run.updating._host.native = None
    largest = max(
        engine._run.store.shards.trained_numel(k)
        for k, placement in enumerate(engine._run.store.placements)
        if placement.tier == DISK
    )
    assert len(engine._run.store.spill.tiles(largest)) >= 3
    for step in range(STEPS):
        loss = engine.step(*batch(step))
        assert loss == want.step(*batch(step))
    assert engine._run.exchanging.started == (mode == "unclipped")
    engine._run.wait()
    nbytes, traffic = on_disk(engine), engine._run.store.traffic
    assert (traffic.read_nbytes, traffic.written_nbytes) == (STEPS * nbytes, (STEPS + 1) * nbytes)
    assert 0 < engine.ledger.host.now["temporaries"] <= engine._run.store.spill.need_nbytes
    assert_same(engine.state_dict(), want.state_dict())
    assert engine.ledger.host.peak_nbytes <= host
    assert engine.ledger.host.now["temporaries"] == 0
    engine.close()


def test_a_forward_does_not_wait_for_the_disk_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for the update; what is written late is what was updated, and is read again only then."""
    want = engine_for(None)
    engine = engine_for(tmp_path, host_for(0.0))
    engine._run.store.spill.stages = 3  # there is hardly room for one
    for step in range(3):
        engine.step(*batch(step))
        want.step(*batch(step))
    engine._run.wait()
    file = file_of(engine, "blocks.2")
    held, write = threading.Event(), file.write
    monkeypatch.setattr(file, "write", lambda *args: (held.wait(20), write(*args)))  # takes three of the four threads
    engine.step(*batch(3))
    want.step(*batch(3))
    assert engine.evaluate(*batch(4)) == want.evaluate(*batch(4))
    assert [gate.open for gates in engine._run.store.spill.writing.values() for gate in gates].count(False) == 1
    held.set()
    assert engine.step(*batch(4)) == want.step(*batch(4))
    assert_same(engine.state_dict(), want.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks(mode: str, tmp_path: Path) -> None:
    settings = {"chunk_numel": 5000, **MODES[mode]}
    for layers, same in pool(2).run(jobs.same_on_disk, "gpt-tiny", 5, settings, str(tmp_path), timeout_seconds=300):
        assert layers == 6
        assert same


def test_a_checkpoint_reads_each_layer_once(tmp_path: Path) -> None:
    host = host_for(0.0)
    engine = engine_for(tmp_path / "disk", host)
    engine.step(*batch(0))
    engine._run.wait()
    before = engine._run.store.traffic.read_nbytes
    engine.save(tmp_path / "ckpt")
    assert engine._run.store.traffic.read_nbytes - before == on_disk(engine)
    assert engine.ledger.host.now["temporaries"] == 0
    assert engine.ledger.host.peak_nbytes <= host
    again = engine_for(None)
    again.load(tmp_path / "ckpt")
    assert_same(again.state_dict(), engine.state_dict())


def test_a_skipped_step_reads_each_layer_once(tmp_path: Path) -> None:
    engine = engine_for(tmp_path, host_for(0.0))
    engine.step(*batch(0))
    before = engine.state_dict()
    reads = engine._run.store.traffic.read_nbytes
    receive = engine._run.store.receive
    engine._run.store.receive = lambda *args, first: receive(args[0], args[1], args[2] * float("nan"), first=first)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="not finite"):
        engine.step(*batch(1))
    engine._run.wait()
    assert engine._run.store.traffic.read_nbytes - reads == on_disk(engine)
    assert_same(engine.state_dict(), before)


def test_layers_that_have_nothing_on_disk(tmp_path: Path) -> None:
    """Without momentum, in fp32 beside others in bf16: such a layer has no states, and its weights are its masters."""
    states: list[dict[str, torch.Tensor]] = []
    host: int | str = "auto"
    for disk in (None, tmp_path):
        torch.manual_seed(0)
        model = zoo.build("resnet-tiny")
        memory = Memory(device="1GiB", host=host, disk=disk)
        engine = Engine(model, optimizer=SGD(lr=0.1), memory=memory, device="cpu")
        engine._run.planning._on_device = frozenset()
        rows = [engine._run.store.placement_nbytes(k) for k in range(len(engine._run.store.placements))]
        host = sum(row[0] + row[1] for row in rows) + max(row[2] for row in rows)
        for step in range(3):
            engine.step(*zoo.example_batch("resnet-tiny", batch=2, step=step))
        states.append(engine.state_dict())
    kinds = [
        (placement.tier, len(placement.file.regions)) for placement in engine._run.store.placements if placement.file is not None
    ]
    assert {("disk", 0), ("disk", 1)} == {*kinds}
    assert_same(states[1], states[0])


def test_what_is_measured(tmp_path: Path) -> None:
    engine = engine_for(tmp_path / "disk", host_for(0.0))
    with Progress(engine, metrics=tmp_path / "m.jsonl", quiet=True) as progress:
        for step in range(4):
            loss = engine.step(*batch(step))
            engine._run.wait()
            progress.update(loss)
    terms, nbytes = engine.bound().terms, on_disk(engine)
    row = read_metrics(tmp_path / "m.jsonl")[-1]
    assert row["disk"] == ("buffered" if engine._run.store.spill.buffered_because else "direct")
    assert row["disk_read_nbytes"] == row["disk_written_nbytes"] == nbytes
    assert terms["disk read"] == nbytes / row["disk_read_nbytes_per_second"]
    assert terms["disk write"] == nbytes / row["disk_write_nbytes_per_second"]
    assert "disk read" in str(engine.bound())
    without = engine_for(None)
    for step in range(4):
        without.step(*batch(step))
    assert not any("disk" in name for name in without.bound().terms)


# Faults.


def broken(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def later(call: Callable[..., int], count: int) -> Callable[..., int]:
    """A call that fails from some time on, in whatever thread."""
    left = iter(range(count))
    return lambda *args: broken() if next(left, None) is None else call(*args)


def steps(engine: Engine, count: int) -> None:
    for step in range(count):
        engine.step(*batch(step))
    engine._run.wait()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", ["read", "write", "bit", "update"])
def test_whatever_fails_ends_training_with_its_cause(
    fault: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(tmp_path / "disk", host_for(0.0), **MODES[mode])
    steps(engine, 3)
    engine.save(tmp_path / "ckpt")
    words = rf"the host's update failed: .*layer '.*', block \d+ of .*could not be {fault if fault == 'read' else 'written'}"
    with monkeypatch.context() as patch:
        if fault == "read":
            patch.setattr(os, "preadv", later(os.preadv, 20))
        elif fault == "write":
            patch.setattr(os, "pwrite", later(os.pwrite, 20))
        elif fault == "bit":
            file = file_of(engine, "blocks.0")
            os.pwrite(file._fd, b"?", file._starts["1"] + 2 * 4096 + 7)
            words = r"the host's update failed: layer 'blocks\.0': region '1', block 2 of .*has the checksum"
        else:
            patch.setattr(engine._run.updating._host, "apply", lambda *_, **__: broken())
            words = r"the host's update failed: .*Input/output error; load the last checkpoint"
        with pytest.raises(RunError, match=words):
            steps(engine, 3)
        for use in (lambda: engine.step(*batch(0)), engine.state_dict, lambda: engine.save(tmp_path / "other")):
            with pytest.raises(RunError, match="load the last checkpoint"):
                use()
    engine.load(tmp_path / "ckpt")
    want = engine_for(None, **MODES[mode])
    want.load(tmp_path / "ckpt")
    steps(engine, 2)
    steps(want, 2)
    assert_same(engine.state_dict(), want.state_dict())
    assert engine.ledger.host.now["temporaries"] == 0
    assert engine.ledger.host.peak_nbytes <= host_for(0.0)


def test_loading_and_closing_while_work_is_pending(tmp_path: Path) -> None:
    engine, want = engine_for(tmp_path / "disk", host_for(0.0)), engine_for(None)
    for step in range(2):
        engine.step(*batch(step))
        want.step(*batch(step))
    with pytest.raises(CheckpointError):
        engine.load(tmp_path / "nothing")  # what was begun is finished
    assert_same(engine.state_dict(), want.state_dict())
    engine.save(tmp_path / "ckpt")
    engine.step(*batch(2))
    engine.load(tmp_path / "ckpt")
    assert_same(engine.state_dict(), want.state_dict())
    engine.step(*batch(2))
    engine.close()
    assert not [gate for gates in engine._run.store.spill.writing.values() for gate in gates if not gate.open]
    want.step(*batch(2))
    assert_same(engine.state_dict(), want.state_dict())


def test_exit_without_close(tmp_path: Path) -> None:
    """With updates on their way, and slow ones: what has not begun is dropped, nothing hangs, nothing is said or left."""
    code = f"""
import os, pathlib, time
from tests.engine.update.test_disk_update import batch, engine_for, host_for
engine = engine_for(pathlib.Path({str(tmp_path)!r}), host_for(0.0))
preadv = os.preadv
os.preadv = lambda *args: (time.sleep(0.3), preadv(*args))[1]
engine.step(*batch(0))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


def test_an_engine_that_is_let_go_ends_its_threads(tmp_path: Path) -> None:
    import gc

    gc.collect()  # engines of other tests end theirs whenever they are collected
    before = {*threading.enumerate()}
    engine = engine_for(tmp_path, host_for(0.0))
    engine.step(*batch(0))
    assert {*threading.enumerate()} - before
    engine._run.wait()
    del engine
    for _ in range(100):  # a thread may be between its last job and its wait for the next: until then it has the job
        gc.collect()
        if not {*threading.enumerate()} - before:
            break
        time.sleep(0.1)
    assert not {*threading.enumerate()} - before
