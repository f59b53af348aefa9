"""Checkpoints: exact at another budget, chunk size and rank count; the last complete one always loads."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp import zoo
from scrimp.checkpoint import _save
from scrimp.chunks.tables.optimizers import SGD, AdamW
from scrimp.engine import Engine, Memory
from scrimp.errors import CheckpointError
from scrimp.ext._rank_start import rank_context
from scrimp.ext.ranks import pool
from tests.engine.test_engine import assert_same, batches_of, engine_for, model_of, run
from tests.rank_jobs import engine as jobs


def trained(precision: str = "bf16", steps: int = 5, **kwargs: object) -> Engine:
    engine = engine_for(model_of("gpt-tiny"), precision=precision, **kwargs)
    run(engine, batches_of("gpt-tiny")[:steps])
    return engine


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_going_on_is_as_if_never_stopped(precision: str, tmp_path: Path) -> None:
    engine = trained(precision)
    engine.save(tmp_path / "ckpt")
    want = run(engine, batches_of("gpt-tiny")[5:10])
    for device, chunk in [("1GiB", 1 << 20), ("600KiB", 1000), ("700KiB", 64)]:
        again = engine_for(model_of("gpt-tiny"), device, precision=precision, chunk_numel=chunk, activations="recompute,offload")
        again.load(tmp_path / "ckpt")
        assert run(again, batches_of("gpt-tiny")[5:10]) == want
        assert_same(again.state_dict(), engine.state_dict())


def test_four_ranks_save_and_one_two_three_load(tmp_path: Path) -> None:
    folder = str(tmp_path / "ckpt")
    settings = {"precision": "fp32", "chunk_numel": 3000}
    pool(4).run(jobs.save_after, "gpt-tiny", 4, settings, folder, timeout_seconds=120)
    states = []
    for world in (4, 1, 2, 3):
        answers = pool(world).run(
            jobs.load_state, "gpt-tiny", {**settings, "chunk_numel": 1000 * world}, folder, timeout_seconds=120
        )
        states.append(answers[0])
    for state in states[1:]:
        assert all(torch.equal(state[key], states[0][key]) for key in states[0])


def test_a_flipped_bit_a_lost_file_and_another_model_are_refused(tmp_path: Path) -> None:
    engine = trained()
    engine.save(tmp_path / "ckpt")
    file = tmp_path / "ckpt" / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors is damaged.*checksum"):
        trained(steps=0).load(tmp_path / "ckpt")
    file.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        trained(steps=0).load(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        trained(steps=0).load(tmp_path)
    engine.save(tmp_path / "ckpt")
    manifest = tmp_path / "ckpt" / "manifest.json"
    text = manifest.read_text()
    for old, new in [('"version": 3', '"version": 9'), ("scrimp.checkpoint", "something.else")]:
        manifest.write_text(text.replace(old, new, 1))
        with pytest.raises(CheckpointError, match=r"this is .*, but this scrimp reads scrimp\.checkpoint version 1 or 2 or 3"):
            trained(steps=0).load(tmp_path / "ckpt")
    manifest.write_text(text)
    with pytest.raises(CheckpointError, match="another model"):
        engine_for(model_of("llama-tiny")).load(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=r"saved in bf16, the engine runs in fp32"):
        trained("fp32", steps=0).load(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=r"AdamW of 2 states, the engine has SGD of 0"):
        trained(steps=0, optimizer=SGD()).load(tmp_path / "ckpt")


def save_and_die(folder: str, moment: int, threads: int) -> None:
    """In a process of its own: a second save, which ends by kill -9 at the given one of its calls. `threads`: of who compares."""
    torch.set_num_threads(threads)
    engine = trained()
    engine.save(folder)
    run(engine, batches_of("gpt-tiny")[5:6])
    calls = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in ("write", "_flush", "_commit"):
        setattr(_save, name, dying(getattr(_save, name)))
    _save.os.replace = dying(os.replace)  # type: ignore[assignment]
    _save.shutil.rmtree = dying(_save.shutil.rmtree)  # type: ignore[assignment]
    engine.save(folder)


@pytest.mark.parametrize("moment", range(1, 12))
def test_kill_9_at_any_moment_of_a_save(moment: int, tmp_path: Path) -> None:
    process = rank_context().Process(target=save_and_die, args=(str(tmp_path / "ckpt"), moment, torch.get_num_threads()))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    engine = trained(steps=0)
    engine.load(tmp_path / "ckpt")
    assert engine.optimizer.steps in (5, 6)
    want = trained(steps=engine.optimizer.steps)
    assert_same(engine.state_dict(), want.state_dict())


def test_random_numbers_go_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny", dropout=0.2)
    engine = Engine(copy.deepcopy(model), optimizer=AdamW(), memory=Memory(device="1GiB"), device="cpu")
    run(engine, batches_of("gpt-tiny")[:3])
    engine.save(tmp_path / "ckpt")
    want = run(engine, batches_of("gpt-tiny")[3:6])
    again = Engine(copy.deepcopy(model), optimizer=AdamW(), memory=Memory(device="1GiB"), device="cpu")
    again.load(tmp_path / "ckpt")
    assert run(again, batches_of("gpt-tiny")[3:6]) == want


def test_extra_comes_back(tmp_path: Path) -> None:
    engine = trained(steps=0)
    engine.save(tmp_path / "ckpt", extra={"position": 12, "scheduler": {"rates": (0.5, 1e-3)}, "done": None})
    assert engine.load(tmp_path / "ckpt") == {"position": 12, "scheduler": {"rates": [0.5, 1e-3]}, "done": None}
    engine.save(tmp_path / "ckpt")
    assert engine.load(tmp_path / "ckpt") == {}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ([1], "extra is a list; give a mapping"),
        ({"a": {1: 2}}, r"extra\['a'\] has the key 1, a int: keys in JSON are text"),
        ({"a": [0.0, float("nan")]}, r"extra\['a'\]\[1\] is nan, which JSON does not have"),
        ({"a": torch.ones(1)}, r"extra\['a'\] is a Tensor: a manifest holds JSON.*with \.tolist\(\)"),
    ],
)
def test_extra_that_json_would_change_is_refused(extra: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        trained(steps=0).save(tmp_path / "ckpt", extra=extra)
    assert not (tmp_path / "ckpt").exists()


def test_a_checkpoint_of_version_2_is_still_read(tmp_path: Path) -> None:
    engine = trained()
    engine.save(tmp_path / "ckpt")
    manifest = tmp_path / "ckpt" / "manifest.json"
    data = json.loads(manifest.read_text())
    del data["extra"]
    manifest.write_text(json.dumps({**data, "version": 2}))
    again = trained(steps=0)
    assert again.load(tmp_path / "ckpt") == {}
    assert_same(again.state_dict(), engine.state_dict())
