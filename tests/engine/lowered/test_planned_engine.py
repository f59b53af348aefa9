"""What an engine under a plan does besides stepping: checkpoints, evaluation, accumulation, clipping, tiers, errors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp import AdamW, Engine, plan, zoo
from scrimp.ext.ranks import pool
from tests.engine.lowered.test_planned_steps import ROWS, plainly
from tests.lower.test_ranks import planned

JOBS = "tests.rank_jobs.planned_engine"


def plan_of(name: str, mesh: str, way: str) -> str:
    return planned(name, {}, mesh, way).to_json()


def run(ranks: int, job: str, *args: Any, **kwargs: Any) -> list[Any]:
    return pool(ranks).run(f"{JOBS}:{job}", *args, **kwargs)


@pytest.mark.parametrize("way", ["zero-1", *(pytest.param(way, marks=pytest.mark.full) for way in ("least", "tp-sp-dist-opt"))])
def test_a_checkpoint_goes_on_under_another_plan_and_without_one(way: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    first = run(4, "saves", plan_of("gpt-tiny", "x=2,y=2", way), "gpt-tiny", ROWS, folder)
    for ranks, mesh, other in ((4, "x=4", "zero-3"), (2, "x=2", "zero-2")):
        losses, evaluated = run(ranks, "loads", plan_of("gpt-tiny", mesh, other), "gpt-tiny", ROWS, folder)[0]
        assert losses == pytest.approx(first[0], rel=1e-5)
        assert evaluated == pytest.approx(first[0][0], rel=1e-6)
    alone = Engine(zoo.build("gpt-tiny"), optimizer=AdamW(lr=1e-3), precision="fp32", device="cpu")
    alone.load(folder)
    assert [float(alone.step(*zoo.example_batch("gpt-tiny", ROWS, step=step))) for step in (2, 3)] == pytest.approx(
        first[0], rel=1e-5
    )
    alone.save(tmp_path / "alone")
    back = Engine(zoo.build("gpt-tiny"), optimizer=AdamW(lr=1e-3), precision="fp32", device="cpu")
    back.load(tmp_path / "alone")


def test_a_checkpoint_without_a_plan_goes_on_under_one(tmp_path: Path) -> None:
    alone = Engine(zoo.build("gpt-tiny"), optimizer=AdamW(lr=1e-3), precision="fp32", device="cpu")
    for step in range(2):
        alone.step(*zoo.example_batch("gpt-tiny", ROWS, step=step))
    alone.save(tmp_path / "saved")
    wanted = [float(alone.step(*zoo.example_batch("gpt-tiny", ROWS, step=step))) for step in (2, 3)]
    losses, _ = run(4, "loads", plan_of("gpt-tiny", "x=2,y=2", "least"), "gpt-tiny", ROWS, str(tmp_path / "saved"))[0]
    assert losses == pytest.approx(wanted, rel=1e-5)


def test_a_step_takes_the_global_batch_or_this_ranks_part() -> None:
    for whole, part, _ in run(4, "by_parts", plan_of("gpt-tiny", "x=4", "zero-3"), "gpt-tiny", ROWS):
        assert whole == part


@pytest.mark.parametrize("way", ["least", "zero-1"])
def test_evaluation_runs_the_model_itself_at_any_shape(way: str) -> None:
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny").eval()
    wanted = model(zoo.example_batch("gpt-tiny", 3)[0])
    for before, after, now in run(4, "evaluates", plan_of("gpt-tiny", "x=2,y=2", way), "gpt-tiny", ROWS):
        assert torch.allclose(before, wanted.detach(), rtol=1e-5, atol=1e-6)
        assert not torch.equal(before, after)
        assert now[0] == now[1]


def test_parameters_can_be_edited() -> None:
    torch.manual_seed(0)
    name = "blocks.0.attention.qkv.weight"
    wanted = 2 * zoo.build("gpt-tiny").get_parameter(name).detach()
    for found in run(4, "edits", plan_of("gpt-tiny", "x=2,y=2", "least"), "gpt-tiny", name):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("way", ["least", "zero-1", "tp"])
def test_the_norm_counts_replicas_once(way: str) -> None:
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny")
    model(*zoo.example_batch("gpt-tiny", ROWS)).backward()
    wanted = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    ran = run(4, "train", plan_of("gpt-tiny", "x=2,y=2", way), "gpt-tiny", {}, ROWS, 1, clip_norm=0.1)
    for _, _, ledger in ran:
        assert ledger["norm"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("by_hand", [False, True])
def test_micro_batches_are_accumulated(by_hand: bool) -> None:
    model, batch = zoo.build("gpt-tiny"), zoo.example_batch("gpt-tiny", ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = plan(model, batch, "4xCPU", mesh="x=2,y=2", precision="fp32", time_limit=2, gap=0.05, micro_batches=2)
    if not by_hand:
        wanted, _ = plainly("gpt-tiny", {}, "adamw", 3)
        for losses, _, _ in run(4, "train", found.to_json(), "gpt-tiny", {}, ROWS, 3):
            assert losses == pytest.approx(wanted, rel=1e-4)
        return
    torch.manual_seed(0)
    plain = zoo.build("gpt-tiny")
    own = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=AdamW().weight_decay)
    wanted = []
    for step in range(2):
        loss = plain(*zoo.example_batch("gpt-tiny", ROWS // 2, step=step))
        (loss / 2).backward()
        wanted.append(float(loss.detach()))
    own.step()
    wanted.append(float(plain(*zoo.example_batch("gpt-tiny", ROWS // 2, step=0)).detach()))
    for losses in run(4, "accumulates", found.to_json(), "gpt-tiny", ROWS, 2):
        assert losses == pytest.approx(wanted, rel=1e-4)


def test_not_a_number_on_one_rank_skips_the_step_on_all() -> None:
    ran = run(4, "poisoned", plan_of("gpt-tiny", "x=2,y=2", "least"), "gpt-tiny", ROWS, 2)
    wanted, _ = plainly("gpt-tiny", {}, "adamw", 1)
    for skipped, words, losses in ran:
        assert skipped == 1
        assert "is not finite; the update is skipped" in words
        assert losses == pytest.approx(wanted, rel=1e-6)


def test_a_budget_below_the_plan_uses_the_host() -> None:
    wanted, _ = plainly("gpt-tiny", {}, "adamw", 4)
    for losses, _, tiers in run(4, "tiered", plan_of("gpt-tiny", "x=2,y=2", "least"), "gpt-tiny", ROWS, 4, 2.0, None):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert {*tiers} == {"device"}
    for losses, _, tiers in run(4, "tiered", plan_of("gpt-tiny", "x=2,y=2", "zero-1"), "gpt-tiny", ROWS, 4, 0.95, None):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert "host" in tiers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "bf16"}, "RunError: the plan is for precision='fp32', and the engine's is 'bf16'"),
        ({"optimizer": "sgd"}, "RunError: the plan is for optimizer='adamw', and the engine's is SGD"),
        ({"activations": "keep"}, "RunError: activations='keep': under a plan"),
        ({"micro_batches": 2}, "RunError: micro_batches=2, and the plan has 1"),
        ({"mesh": "a=4"}, "RunError: mesh='a=4', and the plan's is 'x=2,y=2'"),
        ({"memory": 4096}, "FitError: "),
    ],
)
def test_what_the_plan_is_not_for_is_refused(options: dict[str, Any], words: str) -> None:
    for said in run(4, "refused", plan_of("gpt-tiny", "x=2,y=2", "least"), "gpt-tiny", ROWS, **options):
        assert said.startswith(words)


def test_a_batch_of_another_shape_is_refused_with_both_shapes() -> None:
    for said in run(4, "refused", plan_of("gpt-tiny", "x=4", "zero-3"), "gpt-tiny", 5):
        assert "has the shape (5, 32): under this plan it is (8, 32), the global batch" in said
        assert "or (2, 32), this rank's part (engine.batch_part says which)" in said


def test_another_number_of_ranks_is_refused() -> None:
    for said in run(2, "refused", plan_of("gpt-tiny", "x=2,y=2", "least"), "gpt-tiny", ROWS):
        assert said.startswith("RunError: the plan is for 4 ranks (x=2,y=2), and 2 are here")
