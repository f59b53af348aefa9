"""Sparse exchange under a plan: with everything sent it is the dense plan; with data parallelism alone it is the engine without a
plan, to the bit; with tensor parallelism it does what the formulas say, and replicas stay equal to the bit."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from scrimp import SGD, AdamW, Engine, Mesh, Plan, plan, zoo
from scrimp.exchange import residual_nbytes
from scrimp.ext.ranks import pool
from scrimp.planner import baseline_plan
from tests.rank_jobs.planned import sparse as jobs
from tests.rank_jobs.sparse import ADAM, LR, MOMENTUM

EVERYTHING = {"density": 1.0, "values": "fp32", "masking": False, "small": 300}
FEW = {"density": 0.05, "small": 300}
TP = ("gpt-tiny", "dp=2,tp=2", "tp")


@cache
def plan_of(name: str, mesh: str, way: str, optimizer: str = "sgd", precision: str = "fp32") -> str:
    """`way`: a baseline; "ddp+zero-1" has data parallelism along the first axis and ZeRO 1 along the second."""
    model, batch = zoo.build(name), zoo.example_batch(name, jobs.ROWS)
    way, _, zero = way.partition("+zero-")
    found = baseline_plan(
        model, batch, f"{Mesh.parse(mesh).size}xCPU", way, mesh=mesh, precision=precision, optimizer=optimizer, seconds=3
    )
    if zero:
        layers = [
            replace(each, groups=tuple(replace(group, level=(0, int(zero))) for group in each.groups)) for each in found.layers
        ]
        found = replace(found, layers=tuple(layers))
    return found.to_json()


def run(job: Any, plan: str, *args: Any, **kwargs: Any) -> list[Any]:
    return pool(4).run(job, plan, *args, timeout_seconds=200, **kwargs)


@pytest.mark.parametrize(("name", "mesh", "way"), [TP, pytest.param("gpt-tiny", "x=4", "ddp", marks=pytest.mark.full)])
def test_with_everything_sent_it_is_the_dense_plan(name: str, mesh: str, way: str) -> None:
    for worst, sparse, dense in run(jobs.beside_dense, plan_of(name, mesh, way), name, EVERYTHING):
        assert worst <= 1
        assert sparse == pytest.approx(dense, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "adam", "settings"),
    [
        ("llama-tiny", False, FEW),
        pytest.param("llama-tiny", True, FEW, marks=pytest.mark.full),
        pytest.param("vit-tiny", False, {**FEW, "of": "gradient"}, marks=pytest.mark.full),
    ],
)
def test_data_parallel_it_is_the_engine_without_a_plan(name: str, adam: bool, settings: dict[str, Any]) -> None:
    """To the bit: the same kernels run, and the loss is scaled by a power of two. All gradients of these models arrive as
    summands; in gpt-tiny the plan sums what becomes the gradient of the positions before."""
    optimizer = ADAM if adam else SGD(lr=LR, momentum=MOMENTUM)
    found = plan_of(name, "x=4", "ddp", "adamw" if adam else "sgd")
    assert run(jobs.beside_no_plan, found, name, 6, settings, optimizer=optimizer) == [[]] * 4


@pytest.mark.parametrize(
    ("case", "adam", "raw", "clip"),
    [
        (TP, False, False, 0.5),
        pytest.param(TP, True, False, None, marks=pytest.mark.full),
        pytest.param(TP, False, True, None, marks=pytest.mark.full),
        pytest.param(("llama-tiny", "x=2,y=2", "ddp+zero-1"), True, False, None, marks=pytest.mark.full),
        pytest.param(("llama-tiny", "x=2,y=2", "ddp+zero-3"), False, False, 0.5, marks=pytest.mark.full),
        pytest.param(("gpt-tiny", "x=4", "ddp"), False, False, 0.5, marks=pytest.mark.full),
        pytest.param(("llama-tiny", "dp=2,tp=2", "tp-sp"), False, False, 0.5, marks=pytest.mark.full),
    ],
)
def test_it_does_what_the_formulas_say(case: tuple[str, str, str], adam: bool, raw: bool, clip: float | None) -> None:
    """Every step against fp64, from what each rank had before it and the gradients that its exchange got; these against plain
    PyTorch, within 1e-5."""
    optimizer = ADAM if adam else SGD(lr=LR, momentum=MOMENTUM)
    found = plan_of(*case, "adamw" if adam else "sgd")
    how = {"adam": adam, "raw": raw, "clip": clip, "optimizer": optimizer}
    for wrong, worst, _ in run(jobs.follow, found, case[0], 6, 0.05, 300, **how):
        assert wrong == []
        assert worst < 1e-5


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        ("fp32", "fp32"),
        pytest.param("int8", "fp32", marks=pytest.mark.full),
        pytest.param("fp32", "bf16", marks=pytest.mark.full),
    ],
)
def test_replicas_stay_equal_and_residuals_come_on_top(kind: str, precision: str) -> None:
    """Master weights of all ranks that hold the same part, and residuals of those that differ along tp only, to the bit: random
    numbers of 8 bits depend on the position along dp."""
    found = plan_of(*TP, "sgd", precision)
    ran = run(jobs.train, found, "gpt-tiny", 10, {**FEW, "residual": kind}, clip_norm=1.0, precision=precision)
    replicas = 0
    for key in ran[0][2]["held"]:
        labels, held = zip(*(seen["held"][key] for _, _, seen in ran), strict=True)
        for label in {*labels}:
            masters = [held[rank][0] for rank in range(4) if labels[rank] == label]
            assert all(torch.equal(master, masters[0]) for master in masters), key
        for first in (0, 2):  # ranks 0 and 1, 2 and 3 differ along tp
            if labels[first] == labels[first + 1] and held[first][1].numel():
                assert torch.equal(held[first][1], held[first + 1][1]), key
                replicas += 1
    assert replicas > 0
    for state, losses, seen in ran:
        assert losses == ran[0][1]
        assert seen["norm"] == ran[0][2]["norm"]
        assert sum(losses[-3:]) < sum(losses[:3])
        assert all(torch.equal(value, ran[0][0][key]) for key, value in state.items())
        wanted = sum(residual_nbytes(kind, each[1][0].numel()) for each in seen["held"].values() if each[1][1].numel())
        assert seen["now"]["residual"] == wanted > 0
        assert seen["now"]["gradients"] == 0
        assert seen["peak"] <= 1.01 * Plan.from_json(found).memory.peak_nbytes + wanted + seen["sending"]


@pytest.mark.full
@pytest.mark.parametrize("case", [("llama-tiny", "x=4", "ddp"), TP])
def test_a_small_budget_uses_the_host(case: tuple[str, str, str]) -> None:
    how = {"adam": False, "raw": False, "clip": None, "share": 0.9}
    for wrong, worst, tiers in run(jobs.follow, plan_of(*case), case[0], 6, 0.05, 300, **how):
        assert wrong == []
        assert worst < 1e-5
        assert "host" in tiers


@pytest.mark.full
@pytest.mark.parametrize("adam", [False, True])
def test_micro_batches_are_one_gradient(adam: bool) -> None:
    """Accumulated in the momentum, or for Adam in buffers. With everything sent: the losses of the same plan in one process."""
    optimizer = ADAM if adam else SGD(lr=LR, momentum=MOMENTUM)
    model, batch = zoo.build("llama-tiny"), zoo.example_batch("llama-tiny", jobs.ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = plan(
            model, batch, "4xCPU", mesh="x=4", precision="fp32", time_limit=2, gap=0.05, micro_batches=2, objective="time",
            optimizer="adamw" if adam else "sgd",
        )  # fmt: skip
    torch.manual_seed(0)
    alone = Engine(zoo.build("llama-tiny"), optimizer=optimizer, precision="fp32", device="cpu", micro_batches=2)
    wanted = [float(alone.step(*jobs.batch_of("llama-tiny", step))) for step in range(4)]
    for state, losses, _ in (ran := run(jobs.train, found.to_json(), "llama-tiny", 4, EVERYTHING, optimizer=optimizer)):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert all(torch.equal(value, ran[0][0][key]) for key, value in state.items())


@pytest.mark.full
def test_all_ranks_choose_alike_what_travels_whole() -> None:
    """Ranks 1 and 3 measured a fast network, and ranks 0 and 2, replicas of them along tp, a slow one."""
    ran = run(jobs.chooses, plan_of(*TP), "gpt-tiny", FEW)
    for summed, state in ran:
        assert summed == [False] * len(summed)
        assert all(torch.equal(value, ran[0][1][key]) for key, value in state.items())


def test_not_a_number_on_one_rank_skips_the_step_on_all() -> None:
    for said, kept, on, skipped in run(jobs.poisoned, plan_of(*TP), "gpt-tiny", FEW):
        assert said == ["step 2: gradient of blocks.1.mlp.up.weight is not finite on rank 1; the update is skipped"]
        assert (kept, on, skipped) == (True, True, 1)


def test_replicas_that_differ_stop_all_ranks() -> None:
    for said in run(jobs.differs, plan_of(*TP), "gpt-tiny", FEW):
        assert said.startswith("RunError: step 1: the ranks' weights of layer 'blocks.1' are no longer the same")


@pytest.mark.parametrize("adam", [False, pytest.param(True, marks=pytest.mark.full)])
def test_saved_and_resumed_it_goes_on_as_it_was(adam: bool, tmp_path: Path) -> None:
    """Under the same plan with all residuals, to the bit. Where ranks have other parts, residuals are dropped, and it is said."""
    optimizer = AdamW(lr=4e-3) if adam else SGD(lr=LR, momentum=MOMENTUM)
    found, folder = plan_of(*TP, "adamw" if adam else "sgd"), str(tmp_path / "saved")
    want = run(jobs.train, found, "gpt-tiny", 6, FEW, optimizer=optimizer)
    got = run(jobs.resumed, found, "gpt-tiny", 6, 3, FEW, folder, optimizer=optimizer)
    assert [losses for _, losses in got] == [losses for _, losses, _ in want]
    assert all(torch.equal(value, want[0][0][key]) for key, value in got[0][0].items())
    other = plan_of("gpt-tiny", "x=4", "ddp", "adamw" if adam else "sgd")
    for said, left in run(jobs.loads, other, "gpt-tiny", FEW, folder, optimizer=optimizer):
        assert ["its residuals are dropped" in words for words in said] == [True]
        assert not any(left.values())


@pytest.mark.full
def test_fewer_ranks_along_the_axis_read_what_waits(tmp_path: Path) -> None:
    """The same tiles, half as many ranks that exchange."""
    folder = str(tmp_path / "saved")
    run(jobs.resumed, plan_of(*TP), "gpt-tiny", 4, 3, FEW, folder)
    with_two = plan_of("gpt-tiny", "dp=1,tp=2", "tp")
    for said, left in pool(2).run(jobs.loads, with_two, "gpt-tiny", {**FEW, "axis": "dp"}, folder, timeout_seconds=200):
        assert ["saved by 2 ranks and loaded by 1" in words for words in said] == [True]
        assert all(left.values())


@pytest.mark.full
def test_a_data_parallel_plan_and_no_plan_read_each_others_residuals(tmp_path: Path) -> None:
    found, folder = plan_of("gpt-tiny", "x=4", "ddp"), str(tmp_path / "saved")
    run(jobs.resumed, found, "gpt-tiny", 4, 3, FEW, folder)
    for ranks, which in ((4, None), (4, found), (2, None)):
        for said, left in pool(ranks).run(jobs.loads, which, "gpt-tiny", FEW, folder, timeout_seconds=200):
            assert all(left.values())
            assert len(said) == (ranks != 4)
