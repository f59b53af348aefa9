"""Checkpoints: exact at another budget, chunk size and rank count; the last complete one always loads."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp import zoo
from scrimp.chunks.tables.optimizers import SGD, AdamW
from scrimp.engine import Engine, Memory
from scrimp.errors import CheckpointError
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
    flip(file)
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors is damaged: tensor \S+ .*checksum"):
        trained(steps=0).load(tmp_path / "ckpt")
    file.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        trained(steps=0).load(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=r"no manifest\.json"):
        trained(steps=0).load(tmp_path)
    engine.save(tmp_path / "ckpt")
    manifest = tmp_path / "ckpt" / "manifest.json"
    text = manifest.read_text()
    for old, new in [('"version": 4', '"version": 9'), ("scrimp.checkpoint", "something.else")]:
        manifest.write_text(text.replace(old, new, 1))
        with pytest.raises(
            CheckpointError, match=r"this is .*, but this scrimp reads scrimp\.checkpoint version 1 or 2 or 3 or 4"
        ):
            trained(steps=0).load(tmp_path / "ckpt")
    manifest.write_text(text)
    with pytest.raises(CheckpointError, match="another model"):
        engine_for(model_of("llama-tiny")).load(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=r"saved in bf16, the engine runs in fp32"):
        trained("fp32", steps=0).load(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match=r"AdamW of 2 states, the engine has SGD of 0"):
        trained(steps=0, optimizer=SGD()).load(tmp_path / "ckpt")


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


@pytest.mark.parametrize("version", [2, 3])
def test_checkpoints_of_older_versions_are_still_read(version: int, tmp_path: Path) -> None:
    engine = trained()
    engine.save(tmp_path / "ckpt", extra={"position": 3})
    manifest = tmp_path / "ckpt" / "manifest.json"
    data = json.loads(manifest.read_text())
    del data["checksum"]
    if version < 3:
        del data["extra"]
    whole = hashlib.blake2b((tmp_path / "ckpt" / "rank-0.safetensors").read_bytes(), digest_size=32).hexdigest()
    manifest.write_text(json.dumps({**data, "version": version, "files": [["rank-0.safetensors", whole]]}))
    again = trained(steps=0)
    assert again.load(tmp_path / "ckpt") == ({} if version < 3 else {"position": 3})
    assert_same(again.state_dict(), engine.state_dict())
    flip(tmp_path / "ckpt" / "rank-0.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors is damaged: its checksum is"):
        again.load(tmp_path / "ckpt")


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * at)] ^= 1
    path.write_bytes(data)
