"""Runs of several ranks: the same samples at 1 and 2 ranks, resuming at another number, a plan, and one stop for all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from scrimp.ext.ranks import RankFailure, RankPool, pool
from scrimp.report import read
from scrimp.train import RESUME, read_config
from scrimp.train.data.batches import Batches
from scrimp.train.ranks import Ranks
from tests.train.runs import TOML, figures, losses, run, written

# Without dropout, whose numbers belong to a rank; in fp32, so that the bound is small.
PLAIN = (
    TOML.replace(", dropout = 0.1", "")
    .replace("batch = 4", 'batch = 4\nprecision = "fp32"')
    .replace("batches = 2", "batches = 1")
    .replace("lr = 1e-2", 'name = "sgd"\nlr = 0.1')
)
JOB = "tests.train.runs:run_on_a_rank"
# A loss is a mean of cross-entropies of about 6. Two ranks add in another order: at most 512 roundings of 2^-24 lie on the way
# from a weight to the loss (256 logits, 128 tokens, sums over 32 dims in between). SGD passes errors of gradients on without a
# division. A wrong sample changes a loss by far more (the test below).
TOLERANCE = 512 * 2**-24 * 6


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path, PLAIN)


@pytest.fixture
def ranks2() -> RankPool:
    return pool(2)


def near(one: Path, other: Path) -> None:
    for a, b in zip(losses(one), losses(other), strict=True):
        assert a[0] == b[0]
        for x, y in zip(a[1:3], b[1:3], strict=True):
            assert (x is None) == (y is None)
            assert x is None or abs(x - y) < TOLERANCE, (a, b)


def near_losses(one: Path, other: Path) -> None:
    """Without the validations, which come at the end of a short run too."""
    for a, b in zip(figures(one, "step", "loss"), figures(other, "step", "loss"), strict=True):
        assert a[0] == b[0]
        assert abs(a[1] - b[1]) < TOLERANCE, (a, b)


def test_the_number_of_ranks_may_change(config: Path, tmp_path: Path, ranks2: RankPool) -> None:
    """1, 2, 1 -> 2 and 2 -> 1: the same samples and, but for roundings, the same losses. 2 -> 2: the same bits."""
    alone, both, up, down, again = (tmp_path / name for name in ("alone", "both", "up", "down", "again"))
    short = ("train.steps=2", "schedule.warm_up=0")
    steady = ("schedule.kind=constant", "schedule.warm_up=0")

    def two(folder: Path, *settings: str, how: str = "new") -> None:
        ranks2.run(JOB, str(config), [f"run.folder={folder}", *dict.fromkeys((*steady, *settings))], how)

    run(config, *steady, folder=alone)
    two(both)
    run(config, "schedule.kind=constant", *short, folder=up)
    two(down, "train.steps=2")
    shutil.copytree(down, again)
    two(up, how=RESUME)
    two(again, how=RESUME)
    run(config, *steady, how=RESUME, folder=down)
    near(alone, both)
    near_losses(up, alone)
    near_losses(down, alone)
    assert figures(again, "step", "loss", "lr") == figures(both, "step", "loss", "lr")


def test_other_samples_would_be_seen(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance above is far below what one wrong sample does."""
    one, other = tmp_path / "one", tmp_path / "other"
    run(config, folder=one)
    training = Batches.training

    def wrong(self: Batches, step: int, rows: slice) -> object:
        """One sample of step 3 is there twice."""
        batch = training(self, step, rows)
        return [torch.cat((each[:3], each[:1])) for each in batch] if step == 3 else batch

    monkeypatch.setattr(Batches, "training", wrong)
    run(config, folder=other)
    assert max(abs(a[0] - b[0]) for a, b in zip(figures(one, "loss"), figures(other, "loss"), strict=True)) > 10 * TOLERANCE


def test_a_plan_on_two_ranks(config: Path, tmp_path: Path, ranks2: RankPool) -> None:
    """The planner runs on rank 0; the run resumes with the plan of its folder."""
    alone, planned = tmp_path / "alone", tmp_path / "planned"
    auto = ("cluster.plan=auto", "cluster.time_limit=2", "memory.device=16MiB")
    run(config, "schedule.kind=constant", folder=alone)
    ranks2.run(JOB, str(config), [f"run.folder={planned}", "train.steps=2", "schedule.kind=constant", *auto], "new")
    text = (planned / "plan.json").read_text()
    ranks2.run(JOB, str(config), [f"run.folder={planned}", "schedule.kind=constant", *auto], RESUME)
    assert (planned / "plan.json").read_text() == text
    found = read(planned)
    assert found.plan is not None
    assert found.plan["model"]["name"] == "gpt-tiny"
    near_losses(planned, alone)


def test_sparse_exchange_on_two_ranks(config: Path, tmp_path: Path, ranks2: RankPool) -> None:
    settings = [f"run.folder={tmp_path / 'run'}", "exchange.kind=sparse", "exchange.density=0.1", "train.steps=2"]
    ranks2.run(JOB, str(config), settings, "new")
    assert read(tmp_path / "run").run["settings"]["exchange"] == "sparse, density 0.1"  # type: ignore[index]


def signalled(config: str, folder: str) -> tuple[int, int, str]:
    """Only rank 1 gets a signal, in the second step."""
    import os
    import signal

    import torch.distributed as dist

    from scrimp.train import train
    from scrimp.train.loop import Loop

    step = Loop.step
    if dist.get_rank() == 1:

        def once(self: Loop, args: object, kwargs: object) -> torch.Tensor:
            if self.steps == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, args, kwargs)  # type: ignore[arg-type]

        Loop.step = once  # type: ignore[method-assign, assignment]
    try:
        outcome = train(read_config(config, [f"run.folder={folder}"]), quiet=True)
    finally:
        Loop.step = step  # type: ignore[method-assign]
    return outcome.steps, outcome.signal, str(outcome.checkpoint)


def test_a_signal_to_one_rank_stops_all_after_the_same_step(config: Path, tmp_path: Path, ranks2: RankPool) -> None:
    folder = tmp_path / "run"
    found = ranks2.run("tests.train.test_ranks:signalled", str(config), str(folder))
    assert found == [(2, 15, str(folder / "checkpoints" / "step-00000002"))] * 2


def test_refusals_reach_every_rank(config: Path, tmp_path: Path, ranks2: RankPool) -> None:
    """Rank 0 decides, so no rank waits for another one."""
    with pytest.raises(RankFailure, match=r"(?s)2 of 2 ranks failed.*nothing to resume"):
        ranks2.run(JOB, str(config), [f"run.folder={tmp_path / 'none'}"], RESUME, keep_after_failure=True)
    with pytest.raises(RankFailure, match=r"\[train\] batch is 5, which 2 ranks do not"):
        ranks2.run(JOB, str(config), [f"run.folder={tmp_path / 'odd'}", "train.batch=5"], "new", keep_after_failure=True)


def test_one_rank_needs_no_group() -> None:
    ranks = Ranks()
    assert ranks.first
    assert ranks.from_first({"a": 1}) == {"a": 1}
    assert ranks.mean_and_most(2.5, 3) == (2.5, 3)
