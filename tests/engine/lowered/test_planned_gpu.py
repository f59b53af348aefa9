"""Training under a plan on a GPU: ranks over NCCL, tiers, bf16."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp import AdamW, Engine, Plan, zoo
from scrimp.ext.ranks import RankFailure, RankPool, RankTimeout
from scrimp.planner import baseline_plan
from tests.engine.lowered.test_planned_steps import ROWS, plainly
from tests.lower.test_ranks import planned
from tests.rank_jobs.moves import nccl_hello
from tests.rank_jobs.planned_engine import model_of
from tests.support.lowering.staged import planned as staged_plan

JOBS = "tests.rank_jobs.planned_engine"
EIGHT = {"layers": 8, "dim": 32}
MICRO, STEPS = 4, 4
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def pool_of(world: int) -> Iterator[RankPool]:
    ranks = RankPool(world, timeout_seconds=100, backend="nccl")
    try:
        ranks.run(nccl_hello)
    except (RankFailure, RankTimeout) as error:
        ranks.close()
        pytest.skip(f"NCCL does not run {world} ranks on {torch.cuda.device_count()} GPUs: {str(error)[-300:]}")
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def nccl() -> Iterator[RankPool]:
    yield from pool_of(4)


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    yield from pool_of(2)


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
    settings = {"dim": 1024, "layers": 4}  # the allocator takes segments of 20 MiB
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = planned("gpt-tiny", settings, "x=4", "zero-3")
    wanted, _ = plainly("gpt-tiny", settings, "adamw", 5)
    nbytes = int(0.8 * plan.memory.peak_nbytes)
    ran = nccl.run(f"{JOBS}:train", plan.to_json(), "gpt-tiny", settings, ROWS, 5, device="cuda", memory=nbytes)
    for losses, _, ledger in ran:
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert ledger["all"] <= nbytes
        assert ledger["host"] > 0


# Pipeline stages.


def staged(mesh: str, interleave: int, precision: str = "fp32", optimizer: str = "adamw") -> Plan:
    """A GPT of 8 layers with 2 stages. Its embeddings are tied to its head: they are on both."""
    model, batch = model_of("gpt-tiny", EIGHT), zoo.example_batch("gpt-tiny", ROWS, **EIGHT)
    return staged_plan(model, batch, mesh, 2, MICRO, interleave, precision=precision, optimizer=optimizer, time_limit=3)


def runs(ranks: RankPool, plan: Plan) -> list[Any]:
    given = (plan.to_json(), "gpt-tiny", EIGHT, ROWS, STEPS)
    return ranks.run(f"{JOBS}:train", *given, device="cuda", memory="1GiB", timeout_seconds=180)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("interleave", [1, 2])
def test_two_stages_train_on_a_gpu_as_one_process(pair: RankPool, interleave: int, optimizer: str) -> None:
    wanted, _ = plainly("gpt-tiny", EIGHT, optimizer, STEPS)
    ran = runs(pair, staged("x=1", interleave, optimizer=optimizer))
    for losses, state, _ in ran:
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert losses == ran[0][0]
        assert all(torch.isfinite(each).all() for each in state.values())


@pytest.mark.parametrize("interleave", [1, 2])
def test_stages_of_two_ranks_train_on_a_gpu_as_one_process(nccl: RankPool, interleave: int) -> None:
    wanted, _ = plainly("gpt-tiny", EIGHT, "adamw", STEPS)
    for losses, _, _ in runs(nccl, staged("x=2", interleave)):
        assert losses == pytest.approx(wanted, rel=1e-4)


def test_bf16_stages_train_on_a_gpu_as_an_engine_without_a_plan(pair: RankPool) -> None:
    """A weight has 8 bits: two ways of rounding differ by no more than a few of 2**-9 after a few steps."""
    torch.manual_seed(0)
    alone = Engine(
        zoo.build("gpt-tiny", **EIGHT), optimizer=AdamW(lr=1e-3), precision="bf16", device="cpu", micro_batches=MICRO
    )  # fmt: skip
    wanted = [float(alone.step(*zoo.example_batch("gpt-tiny", ROWS, step=step, **EIGHT))) for step in range(STEPS)]
    for losses, _, _ in runs(pair, staged("x=1", 1, "bf16")):
        assert losses == pytest.approx(wanted, rel=4 * 2**-9)


def test_tied_weights_stay_equal_to_the_bit_on_a_gpu(pair: RankPool) -> None:
    given = (staged("x=1", 1).to_json(), "gpt-tiny", EIGHT, ROWS, STEPS, "embed.weight")
    first, second = pair.run("tests.rank_jobs.staged:tied", *given, device="cuda", memory="1GiB", timeout_seconds=180)
    assert first is not None
    assert torch.equal(first, second)


def test_every_rank_evaluates_and_saves_all_stages_on_a_gpu(pair: RankPool, tmp_path: Path) -> None:
    given = (staged("x=1", 2).to_json(), "gpt-tiny", ROWS, str(tmp_path / "saved"))
    options = {**EIGHT, "options": {"device": "cuda", "memory": "1GiB"}, "timeout_seconds": 180}
    wanted = pair.run(f"{JOBS}:saves", *given, **options)[0]
    for losses, evaluated in pair.run(f"{JOBS}:loads", *given, **options):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert evaluated == pytest.approx(wanted[0], rel=1e-4)
