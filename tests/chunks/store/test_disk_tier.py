"""The disk tier: masters and states of the last layers in spill files. The same bits, within the host's budget; what comes
back from a failing disk is an error, and nothing goes on from it."""

from __future__ import annotations

import copy
import errno
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import zoo
from scrimp.chunks.store.placement import DISK, HOST
from scrimp.chunks.tables.optimizers import SGD, AdamW, Optimizer
from scrimp.chunks.update import update
from scrimp.engine import Engine, Memory
from scrimp.errors import CheckpointError, FitError, RunError
from tests.chunks.spill.test_file import ROOT, _can
from tests.engine.test_engine import LR, adamw, assert_same, traced_peak
from tests.support.reference import train_bf16, train_fp32

SHAPE = {"layers": 4}
STEPS = 6


@cache
def model_of() -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("gpt-tiny", **SHAPE)


@cache
def batches() -> list[Any]:
    return [zoo.example_batch("gpt-tiny", batch=4, step=step, **SHAPE) for step in range(2 * STEPS)]


def engine_for(folder: Path | None, host: int | str = "auto", optimizer: Optimizer | None = None, **settings: Any) -> Engine:
    memory = Memory(device="1GiB", host=host, disk=folder)
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny", **SHAPE)
    return Engine(model, optimizer=optimizer or AdamW(lr=LR), memory=memory, device="cpu", **settings)


def host_for(share: float, precision: str, optimizer: Optimizer | None = None, accumulate: int = 1) -> int:
    """Between the least that the host must have with a disk, and all."""
    engine = engine_for(None, precision=precision, optimizer=optimizer, micro_batches=accumulate)
    rows = [engine._run.store.placement_nbytes(k) for k in range(len(engine._run.store.placements))]
    least = sum(row[0] + row[1] for row in rows) + max(row[2] for row in rows)
    return int(least + share * (sum(map(sum, rows)) - least))


def places(engine: Engine) -> list[str]:
    return [placement.tier for placement in engine._run.store.placements]


def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


@pytest.mark.parametrize(
    ("precision", "optimizer", "make", "accumulate"),
    [
        ("fp32", AdamW(lr=LR), adamw, 1),
        ("bf16", AdamW(lr=LR), adamw, 1),
        ("bf16", SGD(lr=0.1, momentum=0.9), sgd, 2),
    ],
)
def test_bit_equal_with_some_layers_on_disk(
    precision: str, optimizer: Optimizer, make: Any, accumulate: int, tmp_path: Path
) -> None:
    loop = train_fp32 if precision == "fp32" else train_bf16
    want, _ = loop(model_of(), batches()[:STEPS], make, clip=0.7, micro_batches=accumulate)
    found = []
    for share in (0.0, 0.5, 0.9):
        host = host_for(share, precision, optimizer, accumulate)
        engine = engine_for(tmp_path, host, optimizer, precision=precision, clip_norm=0.7, micro_batches=accumulate)
        found.append(places(engine).count(DISK))
        on_disk = sum(engine._run.store.placement_nbytes(k)[2] for k, place in enumerate(places(engine)) if place == DISK)
        for batch in batches()[:STEPS]:
            engine.step(*batch)
        engine._run.wait()
        traffic = engine._run.store.traffic
        # once each in every step; written once more when the model was taken over
        assert (traffic.read_nbytes, traffic.written_nbytes) == (STEPS * on_disk, (STEPS + 1) * on_disk)
        assert_same(engine.state_dict(), want)
        assert engine.ledger.disk.total_nbytes == on_disk
        assert engine.ledger.host.peak_nbytes <= host
        assert engine.ledger.host.now["temporaries"] == 0
    assert found[0] == len(engine._run.store.placements)
    assert found[0] > found[1] > found[2] > 0


@pytest.mark.parametrize("state", ["fp32", "int8"])
def test_the_worker_beside_homes_on_disk(state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kernel both go through stages, and each needs its own."""
    monkeypatch.setattr(update, "host_kernel", lambda: None)
    shape = {"layers": 4, "dim": 128, "seq": 8}
    states = []
    for share in (1.0, 0.5):
        torch.manual_seed(0)
        model = zoo.build("gpt-tiny", **shape)
        probe = Engine(copy.deepcopy(model), optimizer=AdamW(state=state), memory=Memory(device="1GiB"), device="cpu")
        rows = [probe._run.store.placement_nbytes(k) for k in range(len(probe._run.store.placements))]
        least = sum(row[0] + row[1] for row in rows) + max(row[2] for row in rows)
        memory = Memory(device="1GiB", host=int(least + share * (sum(map(sum, rows)) - least)), disk=tmp_path)
        engine = Engine(model, optimizer=AdamW(state=state), memory=memory, device="cpu", clip_norm=0.5)
        engine._run.planning._on_device = frozenset()  # none on the device
        for step in range(4):
            engine.step(*zoo.example_batch("gpt-tiny", batch=2, step=step, **shape))
        assert {*places(engine)} == ({HOST} if share == 1 else {HOST, DISK})
        states.append(engine.state_dict())
    assert_same(*states)


def test_the_last_layer_that_fits_stays_on_the_host(tmp_path: Path) -> None:
    """One byte less than all: the stage of the layer on disk counts, the stages of those that stay do not."""
    everything = host_for(1.0, "bf16")
    assert {*places(engine_for(tmp_path, everything))} == {HOST}
    assert places(engine_for(tmp_path, everything - 1)).count(DISK) >= 1
    least = host_for(0.0, "bf16")
    engine_for(tmp_path, least)
    with pytest.raises(FitError, match=r"Even with all masters and states on disk .* must be on this rank's host"):
        engine_for(tmp_path, least - 1)


def test_a_skipped_step_and_a_failed_one_read_the_masters_again(tmp_path: Path) -> None:
    engine = engine_for(tmp_path, host_for(0.3, "bf16"))
    engine.step(*batches()[0])
    before = engine.state_dict()
    receive = engine._run.store.receive
    engine._run.store.receive = lambda *args, first: receive(args[0], args[1], args[2] * float("nan"), first=first)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="not finite"):
        engine.step(*batches()[1])
    assert_same(engine.state_dict(), before)
    calls = 0

    def failing(*args: Any, first: bool) -> None:
        nonlocal calls
        calls += 1
        if calls == 20:
            raise ValueError("a bug in a hook")
        receive(*args, first=first)

    engine._run.store.receive = failing  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a bug in a hook"):
        engine.step(*batches()[1])
    assert_same(engine.state_dict(), before)
    engine._run.store.receive = receive  # type: ignore[method-assign]
    engine.step(*batches()[1])


def flip(engine: Engine, layer: int) -> None:
    file = engine._run.store.placements[layer].file
    assert file is not None
    (byte,) = os.pread(file._fd, 1, 100)
    os.pwrite(file._fd, bytes([byte ^ 4]), 100)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_flipped_bit_ends_the_run_until_a_checkpoint_is_loaded(precision: str, tmp_path: Path) -> None:
    want = engine_for(None, precision=precision)
    for batch in batches()[:STEPS]:
        want.step(*batch)
    engine = engine_for(tmp_path / "disk", host_for(0.3, precision), precision=precision)
    for batch in batches()[:3]:
        engine.step(*batch)
    engine.save(tmp_path / "ckpt")
    layer = places(engine).index(DISK)
    path = engine._run.store.table.layers[layer].path
    flip(engine, layer)
    words = rf"layer '{path}': region '0', block 0 of 1.*checksum.*load the last checkpoint"
    with pytest.raises(RunError, match=words):  # in the step, or beside it
        step_and_wait(engine, batches()[3])
    uses = (lambda: engine.step(*batches()[4]), lambda: engine.evaluate(*batches()[3]), engine.state_dict)
    for use in (*uses, lambda: engine.save(tmp_path / "other")):
        with pytest.raises(RunError, match=words):
            use()
    assert not (tmp_path / "other").exists()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        engine.load(tmp_path / "other")
    for use in uses:  # what is broken stays broken
        with pytest.raises(RunError, match=rf"layer '{path}': region '0'.*engine\.load\(folder\)"):
            use()
    engine.load(tmp_path / "ckpt")
    for batch in batches()[3:STEPS]:
        engine.step(*batch)
    assert_same(engine.state_dict(), want.state_dict())
    assert engine.ledger.host.now["temporaries"] == 0


def step_and_wait(engine: Engine, batch: Any) -> None:
    engine.step(*batch)
    engine._run.wait()


def test_a_flipped_bit_found_while_saving_or_looking_harms_nothing_else(tmp_path: Path) -> None:
    engine = engine_for(tmp_path / "disk", host_for(0.3, "bf16"))
    engine.step(*batches()[0])
    engine.save(tmp_path / "ckpt")
    flip(engine, places(engine).index(DISK))
    with pytest.raises(RunError, match="checksum"):
        engine.save(tmp_path / "ckpt")
    again = engine_for(None)
    again.load(tmp_path / "ckpt")
    assert again.optimizer.steps == 1


def test_a_disk_that_fails_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tmp_path, host_for(0.3, "bf16"))
    engine.step(*batches()[0])

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        words = r"layer '.*could not be written: Input/output error.*load the last checkpoint"
        with pytest.raises(RunError, match=words):
            step_and_wait(engine, batches()[1])
    with pytest.raises(RunError, match=words):
        engine.step(*batches()[1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoints_with_and_without_a_disk(precision: str, tmp_path: Path) -> None:
    host = host_for(0.3, precision)
    engine = engine_for(tmp_path / "disk", host, precision=precision)
    for batch in batches()[:3]:
        engine.step(*batch)
    engine.ledger.host.reset_peak()
    engine.save(tmp_path / "ckpt")
    without = engine_for(None, precision=precision)
    without.load(tmp_path / "ckpt")
    without.save(tmp_path / "back")
    again = engine_for(tmp_path / "disk", host, precision=precision)
    again.load(tmp_path / "back")
    for batch in batches()[3:STEPS]:
        losses = {float(one.step(*batch)) for one in (engine, without, again)}
        assert len(losses) == 1
    for other in (without, again):
        assert_same(other.state_dict(), engine.state_dict())
    assert max(engine.ledger.host.peak_nbytes, again.ledger.host.peak_nbytes) <= host


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    engine = engine_for(tmp_path / "disk", host_for(0.0, "bf16"))
    engine.step(*batches()[0])
    descriptors = [placement.file._fd for placement in engine._run.store.placements if placement.file is not None]
    assert descriptors
    assert not list((tmp_path / "disk").iterdir())
    engine.close()
    for placement in engine._run.store.placements:
        placement.file = None
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


FULL = """
import sys, torch
from scrimp import zoo
from scrimp.engine import Engine, Memory
from scrimp.errors import FitError
torch.manual_seed(0)
model = zoo.build("gpt-tiny", layers=4, dim=64)
try:
    Engine(model, memory=Memory(device="1GiB", host=sys.argv[2], disk=sys.argv[1]), device="cpu")
except FitError as error:
    print(error)
"""


def test_a_full_disk_is_found_before_training(tmp_path: Path) -> None:
    names = ["unshare", "--map-root-user", "--mount", "--"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if not _can([*names, *mount]):
        pytest.skip("mounting a tmpfs is not allowed here")
    both = ["sh", "-c", '"$0" "$@" && exec "$PY" -c "$CODE" "$WHERE" 1500KB', *mount]
    environment = {**os.environ, "PY": sys.executable, "CODE": FULL, "WHERE": str(tmp_path)}
    done = subprocess.run([*names, *both], capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert "no room for spill files of " in done.stdout, done
    assert "are free in" in done.stdout


def test_a_host_that_is_too_small_is_found_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr("scrimp.chunks.store.store.arena", lambda numel, *_, **__: made.append(numel))
    words = (
        r"model data takes 750\.8 KiB on this rank's host \(weights .* KiB, gradients 0 B, optimizer .* KiB\), its share of the "
        r"host budget is 100\.0 KiB \(as requested, 1 ranks here\), and the device has no room for the rest: 600\.0 KiB "
        r"\(as requested\)\. The least that works is Memory\(host='.*'\) with this device budget; or Memory\(device='.*'\) with "
        r"this host budget, and more for activations; or Memory\(disk=folder, host='.*'\) with .* free in the folder"
    )
    with pytest.raises(FitError, match=words):
        Engine(zoo.build("gpt-tiny", **SHAPE), memory=Memory(device="600KiB", host="100KiB"), device="cpu")
    assert not made


def test_parked_inputs_stay_within_the_hosts_budget() -> None:
    """They are the last resort of the device; where the host has no room for them either, that is what is said."""
    shape = {"layers": 6, "seq": 64, "dim": 32}
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny", **shape)
    batch = zoo.example_batch("gpt-tiny", batch=4, step=0, **shape)
    probe = Engine(copy.deepcopy(model), memory=Memory(device="1GiB"), device="cpu", activations="recompute,offload")
    probe.step(*batch)
    inputs = 4 * 64 * 32 * 2
    data = sum(sum(probe._run.store.placement_nbytes(k)) for k in range(len(probe._run.store.placements)))
    device = traced_peak(probe) - 3 * inputs
    memory = Memory(device=device, host=data + 6 * inputs)
    engine = Engine(copy.deepcopy(model), memory=memory, device="cpu")
    engine.step(*batch)
    assert engine._run.recompute.offloaded
    assert engine.ledger.host.peak_nbytes <= data + 6 * inputs
    engine = Engine(copy.deepcopy(model), memory=Memory(device=device, host=data + 2 * inputs), device="cpu")
    before = engine.state_dict()
    with pytest.raises(FitError, match=r"to the host they need .* of .*activations 32\.0 KiB.*larger Memory\(host"):
        engine.step(*batch)
    assert engine.ledger.host.peak_nbytes <= data + 2 * inputs
    assert_same(engine.state_dict(), before)
