"""Damaged and hostile checkpoints: found before anything is used, by file and tensor, allocating nothing that they say."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp.checkpoint import Checkpoint, _manifest, _save, _write
from scrimp.checkpoint._header import read_header
from scrimp.engine import Engine
from scrimp.errors import CheckpointError
from scrimp.ext._rank_start import rank_context
from scrimp.ext.ranks import pool
from tests.checkpoint.test_checkpoint import flip, trained
from tests.engine.test_engine import assert_same, batches_of, engine_for, model_of, run
from tests.rank_jobs import engine as jobs
from tests.support.manifests import rewritten


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two ranks."""
    folder = tmp_path_factory.mktemp("damage") / "ckpt"
    pool(2).run(jobs.save_after, "gpt-tiny", 2, {"precision": "bf16"}, str(folder), timeout_seconds=120)
    return folder


def loader() -> tuple[Engine, dict[str, torch.Tensor]]:
    engine = engine_for(model_of("gpt-tiny"))
    return engine, engine.state_dict()


def swap(folder: Path) -> None:
    one, other = folder / "rank-0.safetensors", folder / "rank-1.safetensors"
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)


def truncate(folder: Path) -> None:
    path = folder / "rank-1.safetensors"
    os.truncate(path, path.stat().st_size // 2)


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit": (
        lambda folder: flip(folder / "rank-1.safetensors", 0.7),
        r"rank-1\.safetensors is damaged: tensor \S+\.\d+ \(bytes \d",
    ),
    "a bit of a header": (lambda folder: flip(folder / "rank-0.safetensors", 0.001), r"rank-0\.safetensors is damaged: "),
    "a bit of the manifest": (lambda folder: flip(folder / "manifest.json", 0.6), r"manifest\.json is damaged: "),
    "half a file": (truncate, r"rank-1\.safetensors is damaged: it has \d+ bytes .*describes \d+"),
    "no file": (lambda folder: (folder / "rank-0.safetensors").unlink(), r"rank-0\.safetensors is missing"),
    "two files in each other's place": (swap, r"rank-0\.safetensors is damaged: .*it is that of rank-1\.safetensors|header"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_before_anything_is_used(fault: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(saved, folder)
    damage, words = FAULTS[fault]
    damage(folder)
    engine, before = loader()
    with pytest.raises(CheckpointError, match=words):
        engine.load(folder)
    assert_same(engine.state_dict(), before)
    run(engine, batches_of("gpt-tiny")[:1])
    with pytest.raises(CheckpointError, match=words):
        Checkpoint(folder).verify()


def outside(data: dict[str, Any]) -> None:
    data["files"][0]["name"] = "../other/rank-0.safetensors"


def absurd(data: dict[str, Any]) -> None:
    entry = next(iter(data["entries"].values()))
    entry["shape"] = [1 << 40, 1 << 22]


def absurd_in_all(data: dict[str, Any]) -> None:
    entry = next(iter(data["entries"].values()))
    entry["shape"], entry["extents"] = [1 << 40], [{"start": 0, "length": 1 << 40, "rank": 0, "place": 0, "box": None}]


def negative(data: dict[str, Any]) -> None:
    next(iter(data["entries"].values()))["extents"][0]["place"] = -8


def no_such_rank(data: dict[str, Any]) -> None:
    next(iter(data["entries"].values()))["extents"][0]["rank"] = 7


def outside_of_the_parameter(data: dict[str, Any]) -> None:
    each = next(iter(data["entries"].values()))["extents"][0]
    each["start"] += 64


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a path": (outside, r"names the file '\.\./other/rank-0\.safetensors', which is not in its own folder"),
    "a shape": (absurd, r"of shape \(1099511627776, 4194304\) has \d+ elements, its parts in 2 files have \d+"),
    "a shape and its parts": (absurd_in_all, r"ends at element 1099511627776|and \S+ ends at 1099511627776"),
    "a negative place": (negative, "has a number that is none, or below 0"),
    "a rank": (no_such_rank, "has .* elements, its parts in 2 files"),
    "a part outside": (outside_of_the_parameter, "lies outside of it, or on another"),
    "no entries": (lambda data: data.pop("entries"), r"is damaged: KeyError: 'entries'"),
    "entries of another kind": (lambda data: data.update(entries=[1]), r"is damaged: AttributeError"),
    "unknown keys": (lambda data: data.update(run="rm -rf"), r"is damaged: TypeError"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_manifests_are_refused(kind: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(saved, folder)
    change, words = HOSTILE[kind]
    rewritten(folder, change)
    monkeypatch.setattr(torch, "empty", forbidden)

    def opened() -> None:
        _ = Checkpoint(folder).headers

    with pytest.raises(CheckpointError, match=words):
        opened()


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("something was allocated")


def test_headers_and_manifests_of_absurd_size_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-0.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=r"says that its header has 1152921504606846976 \(at most 2 are possible\)"):
        read_header(path)
    with path.open("wb") as file:  # a sparse file, so that the length of the header is possible
        file.write((1 << 30).to_bytes(8, "little"))
        file.truncate(1 << 31)
    with pytest.raises(CheckpointError, match=r"header has 1073741824 \(at most 100000000 are possible\)"):
        read_header(path)
    row = {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}
    text = json.dumps({"weights.0": row}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match=r"its header describes 4398046511\d+"):
        read_header(path)
    for wrong in ({**row, "shape": [3]}, {**row, "dtype": "X"}, {**row, "data_offsets": [8, 4]}, {**row, "shape": [-1]}, []):
        text = json.dumps({"weights.0": wrong}).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(CheckpointError, match="its header cannot be read"):
            read_header(path)
    manifest = tmp_path / "manifest.json"
    with manifest.open("wb") as file:
        file.truncate((1 << 29) + 1)
    with pytest.raises(CheckpointError, match="has 536870913 bytes, which is more than a manifest has"):
        _manifest.Manifest.read(tmp_path)
    manifest.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is damaged"):
        _manifest.Manifest.read(tmp_path)


# Kill -9 in each phase.

PHASES = {
    "before the folder": ("rmtree", 1),
    "before the file": ("reserve", 1),
    "before the first tensor": ("append", 1),
    "in the middle of the tensors": ("append", 8),
    "before the file is flushed": ("close", 1),
    "before the manifest": ("finish", 1),
    "before the manifest is flushed": ("flush", 1),
    "before the folder is flushed": ("flush", 2),
    "before the old one is moved aside": ("replace", 1),
    "before the new one has its name": ("replace", 2),
    "before the name is flushed": ("flush", 3),
    "before the old one is deleted": ("rmtree", 3),
}
IN_SAMPLE = {
    (True, "in the middle of the tensors"), (True, "before the new one has its name"), (False, "in the middle of the tensors"),
    (False, "before the manifest"), (False, "before the new one has its name"), (False, "before the old one is deleted"),
}  # fmt: skip


def save_and_die(folder: str, call: str, number: int, threads: int, wait: bool) -> None:
    """In a process of its own: a second save, which ends by kill -9 at a given call. `threads`: of who compares."""
    torch.set_num_threads(threads)
    engine = trained()
    engine.save(folder)
    run(engine, batches_of("gpt-tiny")[5:6])
    calls = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return made

    owner, name = {
        "rmtree": (shutil, "rmtree"),
        "replace": (os, "replace"),
        "flush": (_save, "flush"),
        "finish": (_save.Save, "_finish"),
        "reserve": (_write.ShardFile, "_reserve"),
        "append": (_write.ShardFile, "append"),
        "close": (_write.ShardFile, "close"),
    }[call]
    setattr(owner, name, dying(getattr(owner, name)))
    engine.save(folder, wait=wait)
    for step in range(6, 12):
        run(engine, batches_of("gpt-tiny")[step : step + 1])
    engine.close()


@pytest.mark.parametrize(
    ("wait", "phase"),
    [
        pytest.param(wait, phase, marks=() if (wait, phase) in IN_SAMPLE else pytest.mark.full)
        for wait in (True, False)
        for phase in PHASES
    ],
)
def test_kill_9_in_each_phase_of_a_save(wait: bool, phase: str, tmp_path: Path) -> None:
    call, number = PHASES[phase]
    args = (str(tmp_path / "ckpt"), call, number, torch.get_num_threads(), wait)
    process = rank_context().Process(target=save_and_die, args=args)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    engine = trained(steps=0)
    engine.load(tmp_path / "ckpt")
    assert engine.optimizer.steps == (6 if phase in ("before the name is flushed", "before the old one is deleted") else 5)
    assert_same(engine.state_dict(), trained(steps=engine.optimizer.steps).state_dict())


# A full disk.


@contextmanager
def small_disk(nbytes: int) -> Iterator[Path]:
    """A tmpfs, where this user may mount one."""
    folder = Path(tempfile.mkdtemp(prefix="scrimp-small-"))
    if os.geteuid() or os.system(f"mount -t tmpfs -o size={nbytes} tmpfs {folder} 2>/dev/null"):
        folder.rmdir()
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        os.system(f"umount {folder}")
        folder.rmdir()


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("checked", [True, False])
def test_a_full_disk_leaves_the_old_checkpoint(wait: bool, checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`checked`: the room is compared first; without that, the file system itself says that there is none."""
    engine = trained()
    with small_disk(6 << 20) as disk:
        engine.save(disk / "ckpt")
        nbytes = (disk / "ckpt" / "rank-0.safetensors").stat().st_size
        (disk / "other").write_bytes(b"x" * ((6 << 20) - nbytes - nbytes // 2))
        if not checked:
            monkeypatch.setattr(_save.Save, "_check_room", lambda self: None)
        run(engine, batches_of("gpt-tiny")[5:6])
        words = rf"there is no room for \S+: it needs \S+ KiB \({nbytes} bytes\), \S+ .iB \(\d+ bytes\) are free there"
        with pytest.raises(CheckpointError, match=words):
            save_twice(engine, disk / "ckpt", wait=wait)
        assert sorted(path.name for path in disk.iterdir()) == ["ckpt", "other"]
        run(engine, batches_of("gpt-tiny")[6:7])
        again = trained(steps=0)
        again.load(disk / "ckpt")
        assert_same(again.state_dict(), trained(steps=5).state_dict())
        (disk / "other").unlink()
        save_twice(engine, disk / "ckpt", wait=wait)
        again.load(disk / "ckpt")
        assert_same(again.state_dict(), engine.state_dict())


def save_twice(engine: Engine, folder: Path, *, wait: bool) -> None:
    """And wait for it."""
    engine.save(folder, wait=wait)
    engine._run.saves.finish()


@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_that_fills_in_the_middle_of_a_write(wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained()
    engine.save(tmp_path / "ckpt")
    real, calls = os.pwrite, 0

    def pwrite(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(_write.os, "pwrite", pwrite)
    run(engine, batches_of("gpt-tiny")[5:6])
    with pytest.raises(
        CheckpointError, match=r"no room for \S+rank-0\.safetensors: it needs .* bytes\) are free there: No space"
    ):
        save_twice(engine, tmp_path / "ckpt", wait=wait)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    again = trained(steps=0)
    again.load(tmp_path / "ckpt")
    assert again.optimizer.steps == 5
    run(engine, batches_of("gpt-tiny")[6:7])
    save_twice(engine, tmp_path / "ckpt", wait=wait)
    again.load(tmp_path / "ckpt")
    assert_same(again.state_dict(), engine.state_dict())
