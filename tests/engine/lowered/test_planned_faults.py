"""What goes wrong under a plan: on one rank, in a save, with a plan that is not for this run, with too little memory."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from scrimp import AdamW, Engine, zoo
from scrimp.ext.ranks import RankFailure, RankPool, pool
from tests.engine.lowered.test_planned_steps import ROWS, plainly
from tests.lower.test_ranks import planned
from tests.rank_jobs.planned import faults as jobs

SECONDS, REPORTS = 8.0, 2.0  # the time-out also holds while rank 0 captures the model for all, on a busy machine
WORLD = 4
NAME = "gpt-tiny"
WHERE = r"layer [\w. ]+, (forward|backward), "
OPERATION = r"(gather|reduction of the gradient) of [\w.]+|move of '\w+' \[.*\]\S* -> \[.*\]|sum of '\w+' over \w|operator \d+"


@cache
def plan_of(mesh: str, way: str, name: str = NAME, **settings: object) -> str:
    return planned(name, settings, mesh, way).to_json()


def check_words(rank: int, text: str) -> None:
    named = re.search(rf"rank {rank}, step 1, ({WHERE}({OPERATION})|after backward, )", text)
    assert named, text
    assert "A rank may have died, hung, or run another program" in text


@pytest.mark.parametrize(("kind", "way", "at"), [
    ("skipped", "zero-3", 5), ("reordered", "zero-3", 4), ("hung", "tp-sp", 7),
    pytest.param("skipped", "tp-sp", 30, marks=pytest.mark.full), pytest.param("hung", "zero-3", 9, marks=pytest.mark.full),
])  # fmt: skip
def test_collectives_that_do_not_meet_end_all_ranks_in_time(kind: str, way: str, at: int) -> None:
    """`seconds`: a rank that hangs is away for longer than all others need to stop."""
    with RankPool(WORLD, timeout_seconds=100, collective_timeout_seconds=SECONDS) as ranks:
        said = ranks.run(jobs.fault, plan_of("x=4", way), NAME, ROWS, kind, at, 2 * SECONDS + REPORTS)
    for rank, (text, seconds) in enumerate(said):
        if kind == "hung" and rank == jobs.AT_FAULT:
            continue
        check_words(rank, text)
        assert seconds < 2 * SECONDS + REPORTS


@pytest.mark.parametrize(("kind", "at"), [
    ("skipped", 2), pytest.param("hung", 2, marks=pytest.mark.full), pytest.param("skipped", 6, marks=pytest.mark.full),
    pytest.param("skipped", 7, marks=pytest.mark.full),
])  # fmt: skip
def test_a_fault_of_a_move_beside_operators_is_named_where_it_is_waited_for(kind: str, at: int) -> None:
    """Of the five gathers that start ahead, and of the two reductions that end later."""
    with RankPool(WORLD, timeout_seconds=100, collective_timeout_seconds=SECONDS) as ranks:
        said = ranks.run(jobs.fault, plan_of("x=4", "zero-3"), NAME, ROWS, kind, at, 2 * SECONDS + REPORTS, True)
    for rank, (text, seconds) in enumerate(said):
        if kind == "hung" and rank == jobs.AT_FAULT:
            continue
        check_words(rank, text)
        assert seconds < 2 * SECONDS + REPORTS


@pytest.mark.parametrize(("kind", "way"), [("dead", "zero-3"), pytest.param("killed", "tp-sp", marks=pytest.mark.full)])
def test_a_rank_that_dies_in_a_step_ends_all_others_in_time(kind: str, way: str) -> None:
    with RankPool(WORLD, timeout_seconds=100, collective_timeout_seconds=SECONDS) as ranks, pytest.raises(RankFailure) as caught:
        ranks.run(jobs.fault, plan_of("x=4", way), NAME, ROWS, kind, 9, 0.0, grace_seconds=4 * SECONDS)
    assert not caught.value.standing
    for rank, text in caught.value.failures.items():
        if rank == jobs.AT_FAULT:
            assert text.startswith("rank 1 died with exit code")
        else:
            check_words(rank, text)
            assert "of rank 1 there is no report" in text or "of rank 1, " in text


KILLED = [(0, moment) for moment in range(1, 12)] + [(1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("rank", "moment"), [pytest.param(*at, marks=() if at in ((0, 6), (1, 1)) else pytest.mark.full) for at in KILLED]
)
def test_kill_9_in_a_save_loses_nothing(rank: int, moment: int, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with RankPool(2, timeout_seconds=100, collective_timeout_seconds=SECONDS) as ranks, pytest.raises(RankFailure) as caught:
        ranks.run(jobs.saves_and_dies, plan_of("x=2", "zero-1"), NAME, ROWS, str(folder), rank, moment, grace_seconds=15)
    assert caught.value.failures[rank].startswith(f"rank {rank} died with exit code -9")
    engine = Engine(zoo.build(NAME), optimizer=AdamW(lr=1e-3), precision="fp32", device="cpu")
    engine.load(folder)
    assert engine.optimizer.steps in (2, 3)
    wanted, _ = plainly(NAME, {}, "adamw", 4)
    for step in range(engine.optimizer.steps, 4):
        assert float(engine.step(*zoo.example_batch(NAME, ROWS, step=step))) == pytest.approx(wanted[step], rel=1e-4)


def test_a_checkpoint_of_eight_ranks_goes_on_with_fewer_and_without_a_plan(tmp_path: Path) -> None:
    folder, job = str(tmp_path / "saved"), "tests.rank_jobs.planned_engine"
    wanted = pool(8).run(f"{job}:saves", plan_of("x=2,y=2,z=2", "least"), NAME, ROWS, folder)[0]
    for ranks, mesh, way in ((4, "x=2,y=2", "tp-sp-dist-opt"), (2, "x=2", "zero-2"), (1, "x=1", "recompute")):
        losses, evaluated = pool(ranks).run(f"{job}:loads", plan_of(mesh, way), NAME, ROWS, folder)[0]
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert evaluated == pytest.approx(wanted[0], rel=1e-6)
    alone = Engine(zoo.build(NAME), optimizer=AdamW(lr=1e-3), precision="fp32", device="cpu")
    alone.load(folder)
    losses = [float(alone.step(*zoo.example_batch(NAME, ROWS, step=step))) for step in (2, 3)]
    assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("llama-tiny", {}, "layer the model: operator 1 is aten.arange.default in the plan and aten.clone.default"),
        (
            NAME,
            {"dim": 64},
            "over dims (64, 32, 8, 32), the model's embed, zoo/gpt.py:embedding has 2 over (64, 64, 8, 32)",
        ),
        (NAME, {"layers": 3}, "the plan has 4 layers, the model 5"),
        (NAME, {"dropout": 0.1}, "operator 4 is aten.sum.dim_IntList in the plan and aten.native_dropout.default"),
    ],
)
def test_a_plan_of_another_model_is_refused_with_the_first_difference(name: str, settings: dict[str, object], words: str) -> None:
    for said in pool(2).run("tests.rank_jobs.planned_engine:refused", plan_of("x=2", "zero-1"), name, ROWS, settings=settings):
        assert said.startswith("RunError: ")
        assert words in said


def test_not_a_number_on_one_rank_names_the_parameter_on_all() -> None:
    said = pool(4).run("tests.rank_jobs.planned_engine:poisoned", plan_of("x=4", "zero-3"), NAME, ROWS, 2)
    for skipped, words, _ in said:
        assert skipped == 1
        assert re.fullmatch(r"step 0: gradient of [\w.]+ is not finite; the update is skipped", words)
        assert words == said[0][1]


@pytest.mark.parametrize("way", ["least", "zero-1"])
def test_too_small_a_budget_is_an_error_before_any_weight_changes(way: str) -> None:
    for text, same in pool(4).run(jobs.too_small, plan_of("x=2,y=2", way), NAME, ROWS, 0.3):
        assert text.startswith("FitError: ")
        assert same
