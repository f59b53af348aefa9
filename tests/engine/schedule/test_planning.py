"""Homes on the device, kept activations, schedules: whatever is chosen for a budget, the numbers are the same."""

from __future__ import annotations

import copy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import zoo
from scrimp.chunks.store.placement import DEVICE, HOST
from scrimp.chunks.tables.optimizers import AdamW
from scrimp.engine import Engine, Memory
from scrimp.ext.ranks import pool
from tests.engine.test_engine import LR, adamw, assert_same, traced_peak
from tests.rank_jobs import engine as jobs
from tests.support.reference import train_bf16, train_fp32

SHAPE = {"layers": 4}
STEPS = 8
SOME = [("fp32", 1, None, "keep"), ("bf16", 1, 0.5, "auto"), ("bf16", 2, None, "recompute,offload"), ("fp32", 2, 0.5, "auto")]
ALL = [*product(["fp32", "bf16"], [1, 2], [None, 0.5], ["keep", "recompute,offload", "auto"])]


@cache
def model_of(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("gpt-tiny", **SHAPE, **more)


@cache
def batches(seq: int = 32, batch: int = 4) -> list[Any]:
    return [
        tuple(t[:, :seq] for t in zoo.example_batch("gpt-tiny", batch=batch, step=step, **SHAPE)) for step in range(2 * STEPS)
    ]


def engine_for(device: int | str = "1GiB", **settings: Any) -> Engine:
    memory = Memory(device=device)
    return Engine(copy.deepcopy(model_of()), optimizer=AdamW(lr=LR), memory=memory, device="cpu", **settings)


def placements(engine: Engine) -> int:
    return sum(placement.tier == DEVICE for placement in engine._run.store.placements)


def moved(engine: Engine, *batch: torch.Tensor) -> int:
    traffic = engine._run.store.traffic
    before = traffic.up_nbytes + traffic.down_nbytes
    engine.step(*batch)
    return traffic.up_nbytes + traffic.down_nbytes - before


def settings_ids(row: tuple[Any, ...]) -> str:
    return "-".join(map(str, row))


def check_budgets(precision: str, accumulate: int, clip: float | None, recompute: str, shares: tuple[float, ...]) -> None:
    settings = {"precision": precision, "micro_batches": accumulate, "clip_norm": clip, "activations": recompute}
    loop = train_fp32 if precision == "fp32" else train_bf16
    want, _ = loop(model_of(), batches()[:STEPS], adamw, clip=clip, micro_batches=accumulate)
    first = engine_for(**{**settings, "activations": "keep" if recompute == "keep" else "recompute,offload"})
    first.step(*batches()[0])
    least = traced_peak(first)
    everything = engine_for(**settings)
    for batch in batches()[:STEPS]:
        everything.step(*batch)
    assert_same(everything.state_dict(), want)
    assert placements(everything) == sum(layer.numel > 0 for layer in everything._run.store.table.layers)
    assert moved(everything, *batches()[0]) == 0
    most = everything.ledger.peak_nbytes
    found, traffic = [], []
    for share in shares:
        budget = int(least + share * (most - least))
        engine = engine_for(budget, **settings)
        for batch in batches()[:STEPS]:
            engine.step(*batch)
        assert_same(engine.state_dict(), want)
        assert engine.ledger.peak_nbytes <= budget
        found.append(placements(engine))
        traffic.append(moved(engine, *batches()[0]))
    if recompute != "auto":  # which saves seconds, be it by moving less or by computing less
        assert traffic == sorted(traffic, reverse=True)
    assert found[0] < found[-1]


@pytest.mark.parametrize("row", SOME, ids=settings_ids)
def test_bit_identical_from_the_least_to_everything(row: Any) -> None:
    check_budgets(*row, shares=(0.0, 0.35, 0.8))


@pytest.mark.full
@pytest.mark.parametrize("row", ALL, ids=settings_ids)
def test_bit_identical_at_all_settings(row: Any) -> None:
    check_budgets(*row, shares=(0.0, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_longer_batch_brings_homes_back(precision: str) -> None:
    short, long = batches(seq=8, batch=2)[:4], batches(batch=8)[4:6]
    mixed = [*short, *long, *batches(seq=8, batch=2)[6:9]]
    loop = train_fp32 if precision == "fp32" else train_bf16
    want, _ = loop(model_of(), mixed, adamw)
    probe = engine_for(precision=precision)
    for batch in short:
        probe.step(*batch)
    everything = probe.ledger.peak_nbytes
    probe = engine_for(precision=precision, activations="recompute,offload")
    probe.step(*long[0])
    budget = max(traced_peak(probe), everything)
    engine = engine_for(budget, precision=precision)
    seen = []
    for batch in mixed:
        engine.step(*batch)
        seen.append(placements(engine))
    assert seen[3] > 0
    assert seen[5] < seen[3]
    assert_same(engine.state_dict(), want)
    assert engine.ledger.peak_nbytes <= budget


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_the_host_has_no_room_for_lives_on_the_device_from_the_start(precision: str, tmp_path: Path) -> None:
    """And stays there when a longer batch wants room, since there is nowhere to go."""
    mixed = [*batches(seq=8, batch=2)[:3], *batches(batch=8)[3:5], *batches(seq=8, batch=2)[5:STEPS]]
    loop = train_fp32 if precision == "fp32" else train_bf16
    want, _ = loop(model_of(), mixed, adamw)
    whole = engine_for(precision=precision)
    sizes = [sum(whole._run.store.placement_nbytes(k)) for k in range(len(whole._run.store.placements))]
    host = sum(sizes) * 2 // 3
    memory = Memory(device="1GiB", host=host)
    engine = Engine(
        copy.deepcopy(model_of()),
        optimizer=AdamW(lr=LR),
        memory=memory,
        device="cpu",
        precision=precision,
        activations="recompute,offload",
    )
    first = placements(engine)
    assert 0 < first < len(sizes)
    assert engine.ledger.host.total_nbytes <= host
    engine.step(*mixed[0])
    everything = placements(engine)
    assert everything > first  # there was room
    engine.save(tmp_path / "one")
    engine._run.planning.placements_back()
    assert 0 < placements(engine) < everything
    for batch in mixed[1:]:
        engine.step(*batch)
    assert engine.ledger.host.peak_nbytes <= host
    assert_same(engine.state_dict(), want)
    again = Engine(
        copy.deepcopy(model_of()),
        optimizer=AdamW(lr=LR),
        memory=memory,
        device="cpu",
        precision=precision,
        activations="recompute,offload",
    )
    again.load(tmp_path / "one")
    for batch in mixed[1:]:
        again.step(*batch)
    assert_same(again.state_dict(), want)
    engine.close()
    assert engine.ledger.host.total_nbytes <= host


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluating_a_large_batch_between_steps(precision: str) -> None:
    """It takes the room of homes, if it must; the numbers of the steps around it do not change."""
    small, large = batches(seq=8, batch=2)[:STEPS], batches(batch=8)[0]
    loop = train_fp32 if precision == "fp32" else train_bf16
    want, _ = loop(model_of(), small, adamw)
    probe = engine_for(precision=precision)
    for batch in small:
        probe.step(*batch)
    budget = probe.ledger.peak_nbytes
    probe.ledger.reset_peak()
    answer = probe.evaluate(*large)
    assert placements(probe) > 0
    engine = engine_for(budget, precision=precision)
    for step, batch in enumerate(small):
        engine.step(*batch)
        if step == 4:
            assert placements(engine) > 0
            engine.evaluate(*large)
            assert placements(engine) == 0
    assert placements(engine) > 0  # again
    assert_same(engine.state_dict(), want)
    assert torch.equal(engine.evaluate(*large), answer)
    assert engine.ledger.peak_nbytes <= budget


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gradient_that_is_not_finite_with_homes_on_the_device(precision: str, accumulate: int) -> None:
    engine = engine_for(precision=precision, micro_batches=accumulate)
    for batch in batches()[:4]:
        engine.step(*batch)
    assert placements(engine) > 0
    before, again = engine.state_dict(), engine.evaluate(*batches()[5])
    receive = engine._run.store.receive

    def spoil(layer: int, slot: Any, gradient: torch.Tensor, *, first: bool) -> None:
        receive(layer, slot, gradient * float("nan") if "blocks.2" in slot.name else gradient, first=first)

    engine._run.store.receive = spoil  # type: ignore[method-assign]
    if precision == "fp16":  # part of the scaling, and no news
        engine.step(*batches()[5])
        assert engine._run.loss_scale.value == 2.0**15
    else:
        with pytest.warns(UserWarning, match=r"gradient of blocks\.2.* is not finite"):
            engine.step(*batches()[5])
    engine._run.store.receive = receive  # type: ignore[method-assign]
    assert_same(engine.state_dict(), before)
    assert torch.equal(engine.evaluate(*batches()[5]), again)  # what computes is restored, too, not just masters
    assert engine.ledger.now["gradients"] == sum(
        engine._run.store.placement_nbytes(k)[1] for k in range(len(engine._run.store.placements))
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoints_with_and_without_homes_on_the_device(precision: str, tmp_path: Path) -> None:
    engine = engine_for(precision=precision)
    for batch in batches()[:4]:
        engine.step(*batch)
    assert placements(engine) > 0
    engine.save(tmp_path / "a")
    want = [float(engine.step(*batch)) for batch in batches()[4:STEPS]]
    probe = engine_for(precision=precision, activations="recompute,offload")
    probe.step(*batches()[0])
    tight = engine_for(traced_peak(probe), precision=precision)
    tight.load(tmp_path / "a")
    tight.save(tmp_path / "b")
    assert [float(tight.step(*batch)) for batch in batches()[4:STEPS]] == want
    assert placements(tight) < len(tight._run.store.placements)
    engine.load(tmp_path / "b")  # while its homes are on the device
    assert placements(engine) > 0
    assert [float(engine.step(*batch)) for batch in batches()[4:STEPS]] == want
    assert_same(engine.state_dict(), tight.state_dict())
    engine.close()
    assert {placement.tier for placement in engine._run.store.placements} == {HOST}
    assert_same(engine.state_dict(), tight.state_dict())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_with_homes_on_the_device(accumulate: int) -> None:
    settings = {"precision": "fp32", "chunk_numel": 5000, "micro_batches": accumulate}
    answers = pool(2).run(jobs.alongside, "gpt-tiny", STEPS, "adamw", settings, timeout_seconds=120)
    for state, peak, host, budget, worst in answers:
        assert host == 0  # nothing has its home there any more
        assert peak <= budget
        assert max(worst.values()) <= 1, worst  # of the bound on roundings
        assert all(torch.equal(state[key], value) for key, value in answers[0][0].items())
