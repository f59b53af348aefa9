"""Two gloo ranks: the numbers of one process that accumulates their batches, sharded model data, checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("lightning", reason="lightning is not installed (it is in the dev extra)")
from scrimp.ext.ranks import pool
from tests.ext.lightning import rank_jobs as jobs
from tests.ext.lightning.models import Tiny, fitted, same, weights_of
from tests.ext.lightning.test_training import pytestmark  # noqa: F401 - the same filters

TRAIN = "tests.ext.lightning.rank_jobs:train"


def one_process(epochs: int) -> Any:
    """Plain Lightning with the ranks' batches in turn, as two micro-batches of each step."""
    torch.manual_seed(0)
    module = Tiny()
    parts = [jobs.rows_of(rank).split(jobs.BATCH) for rank in range(jobs.WORLD)]
    turns = torch.cat([part for both in zip(*parts, strict=True) for part in both])
    data = DataLoader(turns, batch_size=jobs.BATCH)  # type: ignore[arg-type]
    return fitted(module, train=data, accumulate_grad_batches=2, max_epochs=epochs)


@pytest.mark.full
def test_two_ranks_equal_one_process_that_accumulates(tmp_path: Path) -> None:
    """Halving is exact, so the mean of two gradients is the sum of their halves."""
    ranks = pool(2)
    first, second = ranks.run(TRAIN, str(tmp_path / "two.ckpt"), 2)
    plain, want = one_process(2)
    assert first["losses"] == [2 * loss for loss in want.losses[0::2]]
    assert second["losses"] == [2 * loss for loss in want.losses[1::2]]
    assert same(first["weights"], weights_of(plain))
    assert second["weights"] == {}
    assert (first["ranks"], second["ranks"]) == ((0, 2, True), (1, 2, False))
    assert first["logged"][-1]["val_loss"] == second["logged"][-1]["val_loss"]  # reduced over the ranks
    assert "trainer.predict on 2 ranks is not possible" in first["refused"]
    assert {path.name for path in (tmp_path / "two.ckpt").glob("rank-*")} == {"rank-0.safetensors", "rank-1.safetensors"}
    saved = torch.load(tmp_path / "two.weights", weights_only=False)
    assert same(saved["state_dict"], first["weights"])

    more = ranks.run(TRAIN, str(tmp_path / "two.ckpt"), 3, resume=True)[0]
    whole = one_process(3)[0]
    assert same(more["weights"], weights_of(whole))


SCRIPT = """
import lightning.pytorch as pl
from scrimp.ext.lightning import Budget
from tests.ext.lightning.models import fitted, Tiny
trainer, seen = fitted(Tiny(), Budget("2MiB"), max_epochs=1, devices=DEVICES)
print("ranks", trainer.world_size, len(seen.losses))
"""


@pytest.mark.full
@pytest.mark.parametrize(("devices", "words"), [(2, "ranks 2 3"), (3, "give Trainer(devices=2, num_nodes=1)")])
def test_torchrun(devices: int, words: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("DEVICES", str(devices)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert words in done.stdout + done.stderr
    assert (done.returncode == 0) == (devices == 2)
