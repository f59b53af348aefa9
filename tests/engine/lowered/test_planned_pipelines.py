"""Training under plans with pipeline stages: the losses and weights of one process with plain PyTorch, the bytes of the plan by
the ledger, checkpoints, weights on several stages."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp import AdamW, Engine, Mesh, Plan, RunError, zoo
from scrimp.chunks import Wire
from scrimp.engine.lowered.program import program_of
from scrimp.ext.ranks import RankFailure, RankPool, pool
from tests.lower import test_ranks
from tests.rank_jobs.planned_engine import model_of
from tests.rank_jobs.staged import odd, odd_batch, trained
from tests.run import cases as run_cases
from tests.run import check as run_check
from tests.support.bounds import U
from tests.support.lowering.staged import batch_for, planned

ROWS, MICRO, STEPS = 8, 4, 3
JOBS, TRAIN = "tests.rank_jobs.staged", "tests.rank_jobs.planned_engine:train"
LR, MOMENTUM = 1e-2, 0.9  # of SGD
EIGHT = {"layers": 8}
Case = tuple[str, int, int, str, int, str]  # family, stages, pieces a stage, mesh, hidden size, optimizer
ONE: Case = ("gpt", 2, 1, "x=1", 32, "adamw")
TWO: Case = ("gpt", 2, 2, "x=2", 32, "sgd")
# Of the cases of `make test-run`, with fewer steps.
QUICK = [run_cases.Case("gpt-8", "x=1", "least", "adamw", 2, 1), run_cases.Case("gpt-8", "x=2", "least", "sgd", 2, 2)]
FULL = [
    run_cases.Case("gpt-8", "x=2,y=2", "least", "adamw", 2, 2),
    run_cases.Case("gpt-8-256", "x=2", "least", "adamw", 4, 1),
    run_cases.Case("llama-8", "x=1", "fast", "sgd", 4, 2),
    run_cases.Case("llama-8-256", "x=2", "least", "sgd", 2, 2),
    run_cases.Case("hf-t5-8", "x=2", "least", "sgd", 2, 1),
    run_cases.Case("hf-t5-8", "x=1", "recompute", "adamw", 4, 1),
    run_cases.Case("moe-8", "x=2", "least", "adamw", 4, 2),
    run_cases.Case("moe-8", "x=2,y=2", "offload", "sgd", 2, 1),
]


def named(family: str, dim: int = 32) -> tuple[str, dict[str, Any]]:
    """The model's name and settings, for jobs."""
    return ("t5", {"dim": dim}) if family == "t5" else (f"{family}-tiny", {**EIGHT, "dim": dim})


@cache
def plan_of(case: Case) -> Plan:
    family, stages, interleave, mesh, dim, optimizer = case
    if family == "t5":
        pytest.importorskip("transformers")
    model, batch = model_of(*named(family, dim)), batch_for(family, ROWS, dim)
    return planned(model, batch, mesh, stages, MICRO, interleave, optimizer=optimizer, time_limit=2)


def ranks_of(plan: Plan) -> int:
    return (1 if plan.schedule is None else len(plan.schedule.stages)) * plan.mesh.size


def run(plan: Plan, job: str, *args: Any, **kwargs: Any) -> list[Any]:
    name = job if ":" in job else f"{JOBS}:{job}"
    return pool(ranks_of(plan)).run(name, plan.to_json(), *args, timeout_seconds=180, **kwargs)


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str)
def test_stages_train_as_one_process(case: run_cases.Case) -> None:
    if case.model.startswith("hf-"):
        pytest.importorskip("transformers")
    verdict = run_check.run(case, STEPS)
    assert not verdict.no_plan
    assert not verdict.faults
    assert len(verdict.peaks) == case.stages * Mesh.parse(case.mesh).size


@pytest.mark.full
def test_stages_train_in_bf16_as_an_engine_without_a_plan() -> None:
    """A weight has 8 bits: two ways of rounding differ by no more than a few of 2**-9 after a few steps."""
    name, settings = named("gpt")
    plan = planned(model_of(name, settings), batch_for("gpt", ROWS), "x=1", 2, MICRO, 1, precision="bf16", time_limit=4)
    alone = Engine(model_of(name, settings), optimizer=AdamW(lr=1e-3), precision="bf16", device="cpu", micro_batches=MICRO)
    wanted = [float(alone.step(*batch_for("gpt", ROWS, step=step))) for step in range(STEPS)]
    for losses, _, ledger in run(plan, TRAIN, name, settings, ROWS, STEPS):
        assert losses == pytest.approx(wanted, rel=4 * 2**-9)
        assert ledger["norm"] == pytest.approx(alone.optimizer.norm, rel=0.05)


@pytest.mark.full
def test_statistics_frozen_and_unused_parameters_are_right_on_every_stage() -> None:
    """The first stage trains nothing, and both write running statistics, which an evaluation reads on every rank."""
    plan = planned(odd(), odd_batch(0), "x=1", 2, 2, 1, time_limit=4)
    alone = Engine(odd(), optimizer=AdamW(lr=1e-3), precision="fp32", device="cpu", micro_batches=2)
    losses, evaluated, state = trained(alone, STEPS)
    for found in run(plan, "train_odd", STEPS):
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert found[1] == pytest.approx(evaluated, rel=1e-6)
        assert found[2].keys() == state.keys()
        for name, values in found[2].items():
            assert torch.allclose(values, state[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.full
@pytest.mark.parametrize("case", [("gpt", 2, 1, "x=1", 32, "adamw"), ("gpt", 2, 2, "x=2", 32, "sgd")])
def test_an_engine_trains_the_same_without_tags(case: Case) -> None:
    """As over NCCL, on gloo ranks."""
    given = (*named(case[0]), ROWS, STEPS)
    wanted, found = run(plan_of(case), TRAIN, *given), run(plan_of(case), "trained_over_channels", *given)
    assert [losses for losses, _, _ in found] == [losses for losses, _, _ in wanted]
    for name, weight in wanted[0][1].items():
        assert torch.equal(found[0][1][name], weight), name


# Weights.

TIED: list[tuple[Case, str]] = [
    (("gpt", 2, 1, "x=1", 32, "adamw"), "embed.weight"),
    (("gpt", 2, 2, "x=2", 32, "sgd"), "embed.weight"),
    (("gpt", 4, 1, "x=2", 32, "adamw"), "embed.weight"),
    (("t5", 2, 2, "x=2", 32, "adamw"), "shared.weight"),
    (("t5", 4, 1, "x=1", 32, "adamw"), "shared.weight"),
]


@pytest.mark.parametrize(("case", "weight"), [TIED[0], *(pytest.param(*each, marks=pytest.mark.full) for each in TIED[1:])])
def test_weights_on_several_stages_stay_equal_to_the_bit(case: Case, weight: str) -> None:
    ran = run(plan_of(case), "tied", *named(case[0]), ROWS, 4, weight)
    held = [each for each in ran if each is not None]
    size = plan_of(case).mesh.size
    assert len({k // size for k, each in enumerate(ran) if each is not None}) > 1
    for each in held:
        assert torch.equal(each, held[0])


def test_a_stage_holds_its_own_weights_alone() -> None:
    plan = plan_of(ONE)
    first, second = run(plan, "holds", *named("gpt"), ROWS)
    assert plan.schedule is not None
    assert first.keys() == second.keys()
    both = {name for name in first if first[name] and second[name]}
    assert both == {"embed.weight"}
    assert all(first[name] or second[name] for name in first)
    assert first["blocks.0.mlp.up.weight"]
    assert not second["blocks.0.mlp.up.weight"]


def test_the_norm_counts_each_weight_once_and_clipping_is_exact() -> None:
    model = model_of(*named("gpt"))
    model(*batch_for("gpt", ROWS)).backward()
    wanted = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM).step()
    ran = run(plan_of(TWO), TRAIN, *named("gpt"), ROWS, 1, clip_norm=0.1)
    for _, _, ledger in ran:
        assert ledger["norm"] == pytest.approx(wanted, rel=1e-5)
    for name, weight in model.named_parameters():
        # The gradient is off by 1e-5 of its norm of at most 0.1, the factor by 1e-5, and the weight is rounded twice.
        off = float((ran[0][1][name] - weight.detach()).norm())
        assert off <= 2e-5 * LR * 0.1 + 2 * U * float(weight.detach().norm()), name


# Between steps.


def test_every_rank_reads_and_edits_the_weights_of_all_stages() -> None:
    name, settings = named("gpt")
    model, edited = model_of(name, settings), "blocks.7.mlp.up.weight"
    wanted = model.eval()(batch_for("gpt", 3)[0]).detach()  # type: ignore[index]
    state, ran = model.state_dict(), run(plan_of(ONE), "reads", name, settings, ROWS, edited)
    for rank, found in enumerate(ran):
        before, after = found["outputs"]
        assert torch.allclose(before, wanted, rtol=1e-5, atol=1e-6)
        assert not torch.equal(before, after)
        assert torch.equal(after, ran[0]["outputs"][1])
        assert found["now"][0] == found["now"][1]
        assert found["before"].keys() == state.keys()
        assert found["saved"] == ({*state} if rank == 0 else set())
        for key, values in found["after"].items():
            assert torch.equal(values, found["before"][key] * (2 if key == edited else 1))
            assert torch.equal(values, ran[0]["after"][key])


CHECKPOINTS: list[tuple[Case, list[Case | tuple[str, str]]]] = [
    (("gpt", 2, 1, "x=1", 32, "adamw"), [("x=2", "zero-2")]),
    (("gpt", 2, 2, "x=2", 32, "adamw"), [("gpt", 4, 1, "x=1", 32, "adamw"), ("gpt", 2, 1, "x=1", 32, "adamw"), ("x=4", "least")]),
    (("gpt", 4, 1, "x=2", 32, "adamw"), [("gpt", 2, 1, "x=2", 32, "adamw"), ("x=2,y=2", "tp-sp-dist-opt")]),
]


@pytest.mark.parametrize(
    ("case", "others"), [CHECKPOINTS[0], *(pytest.param(*each, marks=pytest.mark.full) for each in CHECKPOINTS[1:])]
)
def test_a_checkpoint_goes_on_under_other_stages_and_without_a_plan(case: Case, others: list[Any], tmp_path: Path) -> None:
    (name, settings), folder = named("gpt"), str(tmp_path / "saved")
    saves, loads = (f"tests.rank_jobs.planned_engine:{job}" for job in ("saves", "loads"))
    wanted = run(plan_of(case), saves, name, ROWS, folder, **settings)[0]
    for other in others:
        plan = plan_of(other) if len(other) > 2 else test_ranks.planned(name, settings, *other)
        for losses, evaluated in run(plan, loads, name, ROWS, folder, **settings):
            assert losses == pytest.approx(wanted, rel=1e-5)
            assert evaluated == pytest.approx(wanted[0], rel=1e-6)
    alone = Engine(model_of(name, settings), optimizer=AdamW(lr=1e-3), precision="fp32", device="cpu")
    alone.load(folder)
    batches = [zoo.example_batch(name, ROWS, step=step, **settings) for step in (2, 3)]
    assert [float(alone.step(*batch)) for batch in batches] == pytest.approx(wanted, rel=1e-5)
    alone.save(tmp_path / "alone")
    wanted = [float(alone.step(*batch)) for batch in batches]
    again = run(plan_of(case), loads, name, ROWS, str(tmp_path / "alone"), **settings)
    for losses, _ in again:
        assert losses == pytest.approx(wanted, rel=1e-5)


# Faults.


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_not_a_number_on_one_rank_skips_the_step_on_all_stages(rank: int) -> None:
    ran = run(plan_of(ONE), "poisoned", *named("gpt"), ROWS, rank)
    wanted = run_check.losses_of("gpt-8", 1, 1)
    for skipped, words, loss, norm in ran:
        assert skipped == 1
        assert "is not finite; the update is skipped" in words
        assert [loss] == pytest.approx(wanted, rel=1e-6)
        assert norm == ran[0][3]


@pytest.mark.full
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_budget_below_the_plan_uses_host_and_disk(on_disk: bool, tmp_path: Path) -> None:
    wanted = run_check.losses_of("gpt-8", 4, 1)
    disk = str(tmp_path) if on_disk else None
    for losses, tiers, _ in run(plan_of(ONE), "tiered", *named("gpt"), ROWS, 4, 0.9, disk):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert "host" in tiers


@pytest.mark.full
def test_a_stage_that_does_not_fit_says_so_and_the_others_stop_in_time() -> None:
    """A tenth of the plan's peak is less than what the first layer's forward takes, with its weights on the host."""
    with RankPool(2, timeout_seconds=60, collective_timeout_seconds=5) as ranks:
        with pytest.raises(RankFailure) as caught:
            ranks.run(f"{JOBS}:tiered", plan_of(ONE).to_json(), *named("gpt"), ROWS, 1, 0.1, None)
        first, second = (caught.value.failures[rank] for rank in (0, 1))
    assert "FitError: step 0 needs" in first
    assert "This is pipeline stage 0, for which the plan predicts a peak of" in first
    assert "RunError: rank 1, step 0" in second
    assert "a tensor from rank 0 of stage 0 did not arrive" in second


def test_what_cannot_be_done_under_stages_is_refused_with_the_remedy() -> None:
    plan = plan_of(ONE)
    for backward, update, step, taken in run(plan, "by_hand", *named("gpt"), ROWS):
        for said in (backward, update):
            assert "under a plan with 2 pipeline stages is not possible" in said
            assert "use engine.step(*batch), which also updates, with the global batch of 4 micro-batches" in said
        assert "has the shape (2, 32): under this plan it is (8, 32), the global batch" in step
        assert taken["tokens"] == ((8, 32), (8, 32), (slice(0, 8), slice(0, 32)))


def test_a_gpu_over_gloo_is_refused() -> None:
    plan, model = plan_of(ONE), model_of(*named("gpt"))
    with pytest.raises(RunError, match=r"2 pipeline stages, the device is cuda, and the process group is gloo's.*'nccl'"):
        program_of(plan, model, Wire(world=2), AdamW(lr=1e-3), "fp32", torch.device("cuda"))


def test_another_number_of_ranks_is_refused() -> None:
    plan = plan_of(ONE)
    for said in pool(4).run(f"{JOBS}:refused", plan.to_json(), *named("gpt")):
        assert said.startswith("RunError: the plan is for 2 ranks (2 stages of 1 ranks, x=1), and 4 are here")
