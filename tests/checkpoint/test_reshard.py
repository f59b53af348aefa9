"""Resharding: the new checkpoint has the same parameters, masters and states, to the bit, at any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp import AdamW, Sparse, checkpoint
from scrimp.checkpoint import Checkpoint
from scrimp.errors import CheckpointError
from scrimp.ext.ranks import pool
from tests.checkpoint.test_checkpoint import trained
from tests.engine.lowered.test_planned_steps import ROWS
from tests.engine.test_engine import assert_same, batches_of, engine_for, model_of, run
from tests.lower.test_ranks import planned
from tests.rank_jobs import engine as jobs
from tests.rank_jobs import planned_engine


def everything(folder: Path) -> dict[str, torch.Tensor]:
    opened = Checkpoint(folder)
    return {
        f"{name} {key}": torch.cat(list(opened.parts(name, key)))
        for name, entry in opened.manifest.entries.items()
        for key, _ in opened.tensors(entry)
    }


def assert_equal(one: Path, other: Path) -> None:
    mine, theirs = everything(one), everything(other)
    assert mine.keys() == theirs.keys()
    assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]


@pytest.mark.parametrize(("state", "precision"), [("fp32", "bf16"), ("int8", "bf16"), ("fp32", "fp32")])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_all_bits_are_kept(state: Any, precision: str, ranks: int, tmp_path: Path) -> None:
    model = model_of("gpt-tiny")
    frozen = [*model.parameters()][1:4]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        engine = engine_for(model, optimizer=AdamW(lr=1e-3, state=state), precision=precision)
        run(engine, batches_of("gpt-tiny")[:2])
        engine.save(tmp_path / "one", extra={"position": 5})
        lost = checkpoint.reshard(tmp_path / "one", tmp_path / "other", ranks)
        assert len(lost) == (ranks != 1)
        assert_equal(tmp_path / "one", tmp_path / "other")
        assert sorted(path.name for path in (tmp_path / "other").glob("rank-*")) == [
            f"rank-{k}.safetensors" for k in range(ranks)
        ]
        again = engine_for(model, optimizer=AdamW(lr=1e-3, state=state), precision=precision)
        assert again.load(tmp_path / "other") == {"position": 5}
        assert_same(again.state_dict(), engine.state_dict())
        assert run(again, batches_of("gpt-tiny")[2:4]) == run(engine, batches_of("gpt-tiny")[2:4])
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


@pytest.mark.full
@pytest.mark.parametrize(("saved_by", "written_for"), [(4, 3), (2, 4), (4, 2), (8, 1)])
def test_other_ranks_go_on_from_it(saved_by: int, written_for: int, tmp_path: Path) -> None:
    """And so they do from the one that was not written again: the states are the same, bit for bit."""
    settings = {"precision": "bf16", "chunk_numel": 3000}
    pool(saved_by).run(jobs.save_after, "gpt-tiny", 4, settings, str(tmp_path / "one"), timeout_seconds=120)
    checkpoint.reshard(tmp_path / "one", tmp_path / "other", written_for)
    assert_equal(tmp_path / "one", tmp_path / "other")
    shares = [row["nbytes"] for row in json.loads((tmp_path / "other" / "manifest.json").read_text())["files"]]
    assert max(shares) < 1.3 * sum(shares) / written_for
    states = [
        pool(written_for).run(jobs.load_state, "gpt-tiny", settings, str(tmp_path / name), timeout_seconds=120)[0]
        for name in ("one", "other")
    ]
    assert_same(states[1], states[0])


def test_a_plans_checkpoint_becomes_one_without_boxes(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    plan = planned("gpt-tiny", {}, "x=2,y=2", "tp-sp-dist-opt").to_json()
    pool(4).run(planned_engine.saves, plan, "gpt-tiny", ROWS, str(folder), timeout_seconds=120)
    boxes = [each.box for entry in Checkpoint(folder).manifest.entries.values() for each in entry.extents]
    assert any(box is not None and any(length < size for size, _, length in box) for box in boxes)
    checkpoint.reshard(folder, tmp_path / "other", 3)
    assert_equal(folder, tmp_path / "other")
    states = []
    for name in ("one", "other"):
        engine = engine_for(model_of("gpt-tiny"), optimizer=AdamW(lr=1e-3), precision="fp32")
        engine.load(tmp_path / name)
        states.append({**engine.state_dict(), **dict(enumerate(run(engine, batches_of("gpt-tiny")[:2])))})
    assert all(torch.equal(torch.as_tensor(states[0][key]), torch.as_tensor(states[1][key])) for key in states[0])


def test_what_cannot_be_written_again_is_refused(tmp_path: Path) -> None:
    engine = trained(steps=1)
    engine.save(tmp_path / "one")
    with pytest.raises(CheckpointError, match="is the checkpoint itself"):
        checkpoint.reshard(tmp_path / "one", tmp_path / "one", 2)
    with pytest.raises(CheckpointError, match="ranks is 0"):
        checkpoint.reshard(tmp_path / "one", tmp_path / "two", 0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds \['notes.txt'\]"):
        checkpoint.reshard(tmp_path / "one", tmp_path / "mine", 2)
    sparse = engine_for(model_of("gpt-tiny"), exchange=Sparse(density=0.1, small=0))
    run(sparse, batches_of("gpt-tiny")[:1])
    sparse.save(tmp_path / "sparse")
    with pytest.raises(CheckpointError, match="sparse exchange: residuals belong to the 1 ranks"):
        checkpoint.reshard(tmp_path / "sparse", tmp_path / "two", 2)
    assert not (tmp_path / "two").exists()
    assert not (tmp_path / "two.unfinished").exists()
