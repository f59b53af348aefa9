"""Training under a plan on a GPU: ranks over NCCL, tiers, bf16."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from scrimp import AdamW, Engine, zoo
from scrimp.ext.ranks import RankFailure, RankPool, RankTimeout
from scrimp.planner import baseline_plan
from tests.engine.lowered.test_planned_steps import ROWS, plainly
from tests.lower.test_ranks import planned
from tests.rank_jobs.moves import nccl_hello

JOBS = "tests.rank_jobs.planned_engine"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def nccl() -> Any:
    ranks = RankPool(4, timeout_seconds=100, backend="nccl")
    try:
        ranks.run(nccl_hello)
    except (RankFailure, RankTimeout) as error:
        ranks.close()
        pytest.skip(f"NCCL does not run 4 ranks on {torch.cuda.device_count()} GPUs: {str(error)[-300:]}")
    yield ranks
    ranks.close()


@pytest.mark.parametrize(("name", "way"), [("gpt-tiny", "least"), ("gpt-tiny", "zero-1"), ("llama-tiny", "tp-sp")])
def test_a_plan_trains_on_a_gpu_as_one_process(nccl: RankPool, name: str, way: str) -> None:
    plan = planned(name, {}, "x=2,y=2", way)
    wanted, _ = plainly(name, {}, "adamw", 4)
    for losses, _, _ in nccl.run(f"{JOBS}:train", plan.to_json(), name, {}, ROWS, 4, device="cuda", memory="1GiB"):
        assert losses == pytest.approx(wanted, rel=1e-4)


def test_a_bf16_plan_trains_on_a_gpu_as_an_engine_without_a_plan(nccl: RankPool) -> None:
    """A weight has 8 bits: two ways of rounding differ by no more than a few of 2**-9 after a few steps."""
    model, batch = zoo.build("gpt-tiny"), zoo.example_batch("gpt-tiny", ROWS)
    plan = baseline_plan(model, batch, "4xCPU", "zero-3", mesh="x=4", precision="bf16", seconds=3)
    ran = nccl.run(f"{JOBS}:train", plan.to_json(), "gpt-tiny", {}, ROWS, 4, device="cuda", memory="1GiB")
    torch.manual_seed(0)
    alone = Engine(zoo.build("gpt-tiny"), optimizer=AdamW(lr=1e-3), precision="bf16", device="cpu")
    wanted = [float(alone.step(*zoo.example_batch("gpt-tiny", ROWS, step=step))) for step in range(4)]
    for losses, _, _ in ran:
        assert losses == pytest.approx(wanted, rel=4 * 2**-9)


def test_a_small_budget_uses_the_host(nccl: RankPool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = planned("gpt-tiny", {"dim": 256, "layers": 4}, "x=4", "zero-3")
    wanted, _ = plainly("gpt-tiny", {"dim": 256, "layers": 4}, "adamw", 5)
    nbytes = int(0.8 * plan.memory.peak_nbytes)
    ran = nccl.run(f"{JOBS}:train", plan.to_json(), "gpt-tiny", {"dim": 256, "layers": 4}, ROWS, 5, device="cuda", memory=nbytes)
    for losses, _, ledger in ran:
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert ledger["all"] <= nbytes
        assert ledger["host"] > 0
