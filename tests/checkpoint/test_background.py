"""Saves in the background: the state of the call, whatever training does meanwhile; bounded memory; errors that are raised."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scrimp import Memory, Progress, Sparse, read_metrics
from scrimp.checkpoint import _agree, _write
from scrimp.checkpoint._snapshot import Snapshot
from scrimp.chunks.tables.optimizers import SGD, AdamW
from scrimp.engine import Engine
from scrimp.errors import CheckpointError, RunError
from scrimp.ext.ranks import pool
from tests.checkpoint import rank_jobs as jobs
from tests.engine.lowered.test_planned_steps import ROWS
from tests.engine.test_engine import assert_same, batches_of, engine_for, model_of, run
from tests.lower.test_ranks import planned

BATCHES = batches_of("gpt-tiny")


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing of layers waits until the event is set, so that training overtakes it."""
    go, real = threading.Event(), _write.ShardFile.append

    def append(self: _write.ShardFile, name: str, part: torch.Tensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            go.wait(60)
        real(self, name, part)

    with monkeypatch.context() as patch:
        patch.setattr(_write.ShardFile, "append", append)
        try:
            yield go
        finally:
            go.set()


def contents(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every tensor that the manifest speaks of, and the manifest without checksums."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = [load_file(folder / row["name"]) for row in manifest["files"]]
    found: dict[str, torch.Tensor] = {}
    for name, entry in manifest["entries"].items():
        for k, each in enumerate(entry["extents"]):
            file, span = files[each["rank"]], slice(each["place"], each["place"] + each["length"])
            for kind in ("weights", "master", "state-0", "state-1"):
                tensor = file.get(f"{kind}.{entry['layer']}")
                if tensor is not None and (kind == "weights" or entry["trainable"]):
                    found[f"{name} {k} {kind}"] = tensor[span]
    for rank, file in enumerate(files):
        found |= {f"{rank} {name}": tensor for name, tensor in file.items() if name.startswith(("rng.", "buffer."))}
    return found, {key: value for key, value in manifest.items() if key not in ("files", "checksum")}


def assert_alike(one: Path, other: Path) -> None:
    (mine, said), (theirs, also_said) = contents(one), contents(other)
    assert said == also_said
    assert mine.keys() == theirs.keys()
    assert not [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])]


def on_the_host(**settings: Any) -> Engine:
    """An engine that keeps all layers on the host."""
    engine = engine_for(model_of("gpt-tiny"), **settings)
    engine._run.planning._on_device = frozenset()
    return engine


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"precision": "fp32"},
    "sgd": {"optimizer": SGD(lr=0.1, momentum=0.9)},
    "int8": {"optimizer": AdamW(lr=1e-3, state="int8")},
    "accumulated": {"micro_batches": 2},
    "at once": {"skip_nonfinite": False},
}


IN_SAMPLE = {("bf16", "all"), ("bf16", "some"), ("fp32", "none"), ("int8", "some"), ("at once", "all")}


@pytest.mark.parametrize(
    ("kind", "room"),
    [
        pytest.param(kind, room, marks=() if (kind, room) in IN_SAMPLE else pytest.mark.full)
        for kind in SETTINGS
        for room in ("all", "some", "none")
    ],
)
def test_it_has_the_state_of_the_call(kind: str, room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while nothing can be written; with room for copies it need not wait for the writer."""
    engine = on_the_host(**SETTINGS[kind])
    if room != "all":
        limit = 0 if room == "none" else 100_000
        real = Snapshot.__init__
        monkeypatch.setattr(Snapshot, "__init__", lambda self, store, _, layers: real(self, store, limit, layers))
    run(engine, BATCHES[:3])
    engine.save(tmp_path / "want")
    with held(monkeypatch) as go:
        engine.save(tmp_path / "ckpt", wait=False)
        if room != "all":
            threading.Timer(0.3, go.set).start()
        losses = run(engine, BATCHES[3:6])
        assert room != "all" or not (tmp_path / "ckpt").exists()
        go.set()
        engine._run.saves.finish()
    assert_alike(tmp_path / "ckpt", tmp_path / "want")
    assert engine.ledger.host.now["snapshot"] == 0
    again = on_the_host(**SETTINGS[kind])
    again.load(tmp_path / "ckpt")
    assert run(again, BATCHES[3:6]) == losses
    assert_same(again.state_dict(), engine.state_dict())


def test_frozen_layers_and_layers_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt-tiny")
    for parameter in [*model.parameters()][:3]:
        parameter.requires_grad_(False)
    try:
        engine = engine_for(model, device="1GiB")
        run(engine, BATCHES[:5])
    finally:
        model.requires_grad_(True)
    assert "device" in {placement.tier for placement in engine._run.store.placements}
    engine.save(tmp_path / "want")
    with held(monkeypatch):
        engine.save(tmp_path / "ckpt", wait=False)
        run(engine, BATCHES[5:7])
    engine.close()
    assert_alike(tmp_path / "ckpt", tmp_path / "want")


def test_an_edit_and_a_move_wait_until_the_layer_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of frozen parameters are not copied, so nothing may change or move them before."""
    model = copy.deepcopy(model_of("gpt-tiny"))
    name = "blocks.1.mlp.up.weight"
    model.get_parameter(name).requires_grad_(False)
    engine = engine_for(model)
    run(engine, BATCHES[:5])
    assert "device" in {placement.tier for placement in engine._run.store.placements}
    engine.save(tmp_path / "want")
    with held(monkeypatch) as go:
        engine.save(tmp_path / "ckpt", wait=False)
        run(engine, BATCHES[5:6])
        threading.Timer(0.3, go.set).start()
        with engine.full_parameters(name) as whole:
            whole.get_parameter(name).data.fill_(7.0)
        engine._run.planning.placements_back(for_good=True)
        engine._run.saves.finish()
    assert "device" not in {placement.tier for placement in engine._run.store.placements}
    assert_alike(tmp_path / "ckpt", tmp_path / "want")
    assert bool((engine.state_dict()[name] == 7).all())
    engine.close()


def test_with_layers_on_disk_their_updates_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = engine_for(model_of("gpt-tiny"))
    rows = [probe._run.store.placement_nbytes(k) for k in range(len(probe._run.store.placements))]
    probe.close()
    host = sum(row[0] + row[1] for row in rows) + max(row[2] for row in rows)
    short = Engine(
        copy.deepcopy(model_of("gpt-tiny")), memory=Memory(device="1GiB", host=host, disk=tmp_path / "spill"), device="cpu"
    )
    with pytest.warns(UserWarning, match=r"layers on disk are read through .* of host memory, and Memory\(host=...\) leaves 0 B"):
        short.save(tmp_path / "short", wait=False)
    short.close()
    host += max(row[2] for row in rows)
    memory = Memory(device="1GiB", host=host, disk=tmp_path / "spill")
    engine = Engine(copy.deepcopy(model_of("gpt-tiny")), optimizer=AdamW(lr=1e-3), memory=memory, device="cpu")
    engine._run.planning._on_device = frozenset()
    run(engine, BATCHES[:3])
    assert "disk" in {placement.tier for placement in engine._run.store.placements}
    engine.save(tmp_path / "want")
    with held(monkeypatch) as go:
        engine.save(tmp_path / "ckpt", wait=False)
        threading.Timer(0.3, go.set).start()
        run(engine, BATCHES[3:5])
    engine.close()
    assert engine.ledger.host.peak_nbytes <= host
    assert_alike(tmp_path / "ckpt", tmp_path / "want")


def test_memory_is_bounded_and_in_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 300 kB of room, copies take at most that, and the metrics say how long updates waited."""
    engine = on_the_host()
    run(engine, BATCHES[:2])
    host, store = engine.ledger.host, engine._run.store
    room = 300_000
    store.host_room_nbytes = host.peak_nbytes + room
    host.reset_peak()
    layer = max(sum(row) for row in (store.placement_nbytes(k) for k in range(len(store.placements))))
    assert room < sum(store.placement_nbytes(k)[2] for k in range(len(store.placements)))
    with Progress(engine, metrics=tmp_path / "run.jsonl", quiet=True) as progress, held(monkeypatch) as go:
        engine.save(tmp_path / "ckpt", wait=False)
        assert engine._run.saves._running is not None
        snapshot = engine._run.saves._running.snapshot
        threading.Timer(0.5, go.set).start()
        for batch in BATCHES[2:5]:
            progress.update(engine.step(*batch))
        engine._run.saves.finish()
    assert room - layer < snapshot.peak_nbytes <= room
    assert dict(host.peak.by_kind)["snapshot"] <= room
    assert host.peak_nbytes <= store.host_room_nbytes
    waited = [row.get("save_waited_seconds") for row in read_metrics(tmp_path / "run.jsonl")]
    assert any(waited)


def test_a_call_that_needs_the_memory_of_copies_waits_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = on_the_host()
    run(engine, BATCHES[:2])
    host, store = engine.ledger.host, engine._run.store
    with held(monkeypatch) as go:
        engine.save(tmp_path / "ckpt", wait=False)
        run(engine, BATCHES[2:3])
        engine._run.wait()
        assert host.now["snapshot"] > 0
        numel = sum(parameter.numel() for parameter in model_of("gpt-tiny").parameters())
        store.host_room_nbytes = host.total_nbytes - host.now["snapshot"] + 4 * numel
        threading.Timer(0.3, go.set).start()
        with engine.full_parameters():
            assert host.now["snapshot"] == 0
        engine._run.saves.finish()
    engine.close()


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model_of("gpt-tiny"))
    run(engine, BATCHES[:1])
    with held(monkeypatch) as go:
        engine.save(tmp_path / "one", wait=False)
        run(engine, BATCHES[1:2])
        assert not (tmp_path / "one").exists()
        go.set()
        engine.save(tmp_path / "two", wait=False)
        assert (tmp_path / "one" / "manifest.json").exists()
        engine.close()
    assert json.loads((tmp_path / "one" / "manifest.json").read_text())["steps"] == 1
    assert json.loads((tmp_path / "two" / "manifest.json").read_text())["steps"] == 2


@pytest.mark.parametrize("call", ["step", "evaluate", "save", "load", "state_dict", "close"])
def test_an_error_is_raised_by_the_next_call_and_training_goes_on(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(model_of("gpt-tiny"))
    run(engine, BATCHES[:1])
    engine.save(tmp_path / "ckpt")
    monkeypatch.setattr(_write.os, "pwrite", full)
    engine.save(tmp_path / "ckpt", wait=False)
    monkeypatch_after(engine)
    monkeypatch.undo()
    calls = {
        "step": lambda: engine.step(*BATCHES[1]),
        "evaluate": lambda: engine.evaluate(*BATCHES[1]),
        "save": lambda: engine.save(tmp_path / "other"),
        "load": lambda: engine.load(tmp_path / "ckpt"),
        "state_dict": engine.state_dict,
        "close": engine.close,
    }
    with pytest.raises(
        CheckpointError, match=r"in the background failed: there is no room.*bytes\) are free there.*make it again"
    ):
        calls[call]()
    assert not (tmp_path / "ckpt.unfinished").exists()
    calls[call]()
    again = engine_for(model_of("gpt-tiny"))
    again.load(tmp_path / "ckpt")
    assert again.optimizer.steps == 1
    if call != "close":
        engine.step(*BATCHES[1])
        engine.save(tmp_path / "ckpt", wait=False)
        engine.close()


def save_and_wait(engine: Engine, folder: Path) -> None:
    engine.save(folder, wait=False)
    engine._run.saves.finish()


def full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def monkeypatch_after(engine: Engine) -> None:
    """Until the thread has failed."""
    running = engine._run.saves._running
    assert running is not None
    running.thread.join(60)


def test_what_cannot_run_in_the_background_says_so_and_is_saved(tmp_path: Path) -> None:
    engine = engine_for(model_of("gpt-tiny"), optimizer=SGD(lr=0.1, momentum=0.9), exchange=Sparse(density=0.1))
    run(engine, BATCHES[:1])
    with pytest.warns(UserWarning, match="wait=False.*returns when it is complete: with a sparse exchange residuals change"):
        engine.save(tmp_path / "ckpt", wait=False)
    assert (tmp_path / "ckpt" / "manifest.json").exists()
    engine.close()
    with pytest.warns(UserWarning, match="the engine is closed"):
        engine.save(tmp_path / "ckpt", wait=False)


def test_a_failed_update_ends_the_save_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = on_the_host()
    run(engine, BATCHES[:1])
    engine.save(tmp_path / "ckpt")
    updating = engine._run.updating
    monkeypatch.setattr(updating._host, "apply", lambda *_, **__: 1 / 0)
    engine.step(*BATCHES[1])
    with pytest.raises((RunError, CheckpointError), match="host's update failed"):
        save_and_wait(engine, tmp_path / "ckpt")
    monkeypatch.undo()
    engine.load(tmp_path / "ckpt")
    assert engine.optimizer.steps == 1
    run(engine, BATCHES[1:2])


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_save_while_they_train(world: int, tmp_path: Path) -> None:
    settings = {"precision": "bf16", "chunk_numel": 3000}
    pool(world).run(jobs.save_beside_training, "gpt-tiny", settings, str(tmp_path), timeout_seconds=120)
    assert_alike(tmp_path / "ckpt", tmp_path / "want")


@pytest.mark.parametrize("way", ["tp-sp-dist-opt", pytest.param("zero-3", marks=pytest.mark.full)])
def test_under_a_plan(way: str, tmp_path: Path) -> None:
    plan = planned("gpt-tiny", {}, "x=2,y=2", way).to_json()
    pool(4).run(jobs.save_under_a_plan, plan, "gpt-tiny", ROWS, str(tmp_path), timeout_seconds=120)
    assert_alike(tmp_path / "ckpt", tmp_path / "want")


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_rank_is_raised_by_all_in_the_same_call(failing: int, tmp_path: Path) -> None:
    rows = pool(2).run(jobs.fail_on, "gpt-tiny", failing, str(tmp_path), timeout_seconds=120)
    assert rows[0][0] == rows[1][0]  # the call that raised
    for rank, (_, words, steps) in enumerate(rows):
        assert "No space left" in words
        assert (f"rank {failing}: " in words) == (rank != failing)
        assert steps == 6
    assert json.loads((tmp_path / "ckpt" / "manifest.json").read_text())["steps"] == 6
    assert json.loads((tmp_path / "first" / "manifest.json").read_text())["steps"] == 1


@pytest.mark.parametrize("wait", [True, False])
def test_rank_0_ends_a_save_when_all_have_read_its_outcome(wait: bool, tmp_path: Path) -> None:
    """Its process holds the ranks' store, and may end at once."""
    ended, read = pool(2).run(jobs.one_reads_late, "gpt-tiny", str(tmp_path), wait, timeout_seconds=120)
    assert read <= ended


def test_a_rank_that_never_writes_is_named(tmp_path: Path) -> None:
    words = pool(2).run(jobs.one_never_writes, "gpt-tiny", str(tmp_path), timeout_seconds=120)
    assert "rank 1 has not written its part for" in words[0]
    assert _agree.TIMEOUT.total_seconds() == 1800
