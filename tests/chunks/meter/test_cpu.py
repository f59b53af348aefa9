"""The ledger against an independent meter, the profiler's own record of every allocation; and the budget, which that
record must never pass."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from scrimp.chunks.meter import op_profile
from scrimp.chunks.meter.cpu import CpuMeter
from scrimp.engine import Engine
from scrimp.errors import FitError
from scrimp.ledger import Ledger
from scrimp.zoo.gpt import GPT, GPTConfig
from tests.engine.test_engine import batches_of, engine_for, least_budget, model_of, traced_peak
from tests.rank_jobs.moves import most_live
from tests.support.reference import Batch

SAMPLE = [
    ("gpt-tiny", "bf16", "recompute,offload"),
    ("bert-tiny", "bf16", "keep"),
    ("vit-tiny", "fp32", "recompute,offload"),
    ("vgg-tiny", "bf16", "recompute,offload"),
    ("moe-tiny", "bf16", "recompute,offload"),
    ("resnet-tiny", "fp32", "keep"),
]
ALL = [
    (f"{name}-tiny", precision, recompute)
    for name in ("gpt", "llama", "bert", "vit", "vgg", "moe")
    for precision in ("fp32", "bf16")
    for recompute in ("keep", "recompute,offload")
]
CASES = [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.full) for case in ALL if case not in SAMPLE)]


def profiled(engine: Engine, batch: Batch, run: Callable[..., Any] | None = None) -> int:
    """The most that was live in one step by the profiler, with what lived before it began. Not while an update still runs
    beside it, and not while an engine that is gone waits for the garbage collector: what they free began before."""
    engine._run.wait()
    gc.collect()
    before = engine.ledger.total_nbytes + sum(tensor.nbytes for tensor in batch)
    engine.ledger.reset_peak()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        (run or engine.step)(*batch)
    return most_live(profile) + before


def no_homes_on_the_device(engine: Engine) -> None:
    """They would go back when room is short, and the profiler sees no end of what began before it."""
    engine._run.planning._on_device = frozenset()


def check(engine: Engine, batch: Batch, budget: int) -> None:
    engine.step(*batch)  # the tracing step: signatures are weighed, the schedule is made
    seen = profiled(engine, batch)
    assert engine.ledger.peak_nbytes == pytest.approx(seen, rel=0.02)
    assert seen <= budget
    assert engine.ledger.peak_nbytes <= budget


@pytest.mark.parametrize(("name", "precision", "recompute"), CASES)
def test_the_ledgers_peak_is_what_the_allocator_saw(name: str, precision: str, recompute: str) -> None:
    least = least_budget(name, precision, recompute)
    for budget in (least, 2 * least):
        engine = engine_for(model_of(name), budget, precision=precision, activations=recompute)
        check(engine, batches_of(name)[0], budget)


@pytest.mark.parametrize("recompute", ["keep", "recompute,offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_larger_model(precision: str, recompute: str) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=256, seq=128, dim=128, heads=4, layers=4))
    batch = (torch.randint(0, 256, (4, 128)), torch.randint(0, 256, (4, 128)))
    free = engine_for(model, precision=precision, activations=recompute)
    free.step(*batch)
    least = traced_peak(free)
    for budget in (least, 2 * least):
        check(engine_for(model, budget, precision=precision, activations=recompute), batch, budget)


def test_accumulation_and_evaluation_are_metered_too() -> None:
    batch = batches_of("gpt-tiny")[0]
    free = engine_for(model_of("gpt-tiny"), precision="bf16", activations="recompute,offload", micro_batches=2)
    free.step(*batch)
    budget = traced_peak(free)
    engine = engine_for(model_of("gpt-tiny"), budget, precision="bf16", activations="recompute,offload", micro_batches=2)
    check(engine, batch, budget)
    engine.evaluate(*batch)
    engine._run.residents.abandon()  # the profiler sees no end of what began before it
    seen = profiled(engine, batch, engine.evaluate)
    assert engine.ledger.peak_nbytes == pytest.approx(seen, rel=0.02)
    assert engine.ledger.peak.when.startswith("in an evaluation, at layer ")


def test_longer_sequences_than_the_schedule_was_made_for_stay_within_the_budget() -> None:
    """Operators of signatures that were never weighed, in a step that holds all the layers the budget allowed before."""
    short, long = ((torch.zeros(4, length, dtype=torch.long), torch.ones(4, length, dtype=torch.long)) for length in (16, 32))
    free = engine_for(model_of("gpt-tiny"), precision="bf16", activations="recompute,offload")
    free.step(*long)
    budget = traced_peak(free)
    engine = engine_for(model_of("gpt-tiny"), budget, precision="bf16", activations="recompute,offload")
    no_homes_on_the_device(engine)
    for _ in range(2):
        engine.step(*short)
    assert profiled(engine, long) <= budget


class Hungry(nn.Module):
    """Its peak is one operator, that is given the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() + torch.sort(x.detach().flatten())[0][0]


def test_an_operator_that_is_known_not_to_fit_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "scrimp.engine.entry.least_budget.available_host_nbytes", lambda: 0
    )  # nor to find out how much it would take
    engine = engine_for(Hungry(), "1MiB", precision="fp32", activations="keep")
    no_homes_on_the_device(engine)
    batch = torch.ones(4096)
    for _ in range(2):
        engine.step(batch)
    need = engine.ledger.peak_nbytes
    assert engine.ledger.peak.when == "in step 0, forward at layer the model itself"
    assert profiled(engine, (batch,)) <= need
    engine._run.budget = replace(engine._run.budget, device_nbytes=need - 1)
    assert isinstance(engine._run.meter, CpuMeter)
    engine._run.meter.budget_nbytes = need - 1
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profile,
        pytest.raises(FitError, match=r"in step 3, forward at layer the model itself: .*temporaries"),
    ):
        engine.step(batch)
    assert most_live(profile) < 4096 + torch.get_rng_state().nbytes  # which is kept to undo a step


def test_evaluating_more_than_fits_is_refused_and_nothing_in_use_goes() -> None:
    engine = engine_for(model_of("gpt-tiny"), least_budget("gpt-tiny", "fp32"), precision="fp32", activations="recompute,offload")
    tokens = torch.zeros(512, 32, dtype=torch.long)
    with pytest.raises(FitError, match=r"in an evaluation, at layer"):
        engine.evaluate(tokens, tokens)
    engine.step(*batches_of("gpt-tiny")[0])


class Hidden(nn.Module):
    """Its peak is one operator that makes a copy of what it is given, on every processor, and gives back one number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x.detach() * 2
        return self.weight.sum() + made.median()


HIDDEN = torch.arange(1 << 16, dtype=torch.float32)


def test_without_the_private_profiler_outputs_are_still_metered(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not what a kernel makes and frees inside: how much that is depends on the processor, and for gpt-tiny it may be
    nothing."""
    weighed = least_budget("gpt-tiny", "bf16")
    hidden = [engine_for(Hidden(), precision="fp32", activations="keep") for _ in range(2)]
    hidden[0].step(HIDDEN)
    monkeypatch.setattr(op_profile, "listen", lambda: False)
    logits = batches_of("gpt-tiny")[0][0].numel() * model_of("gpt-tiny").embed.weight.shape[0] * 2
    assert logits < least_budget("gpt-tiny", "bf16") <= weighed
    hidden[1].step(HIDDEN)
    outputs, both = hidden[1].ledger.peak_nbytes, hidden[0].ledger.peak_nbytes
    batch_and_product = 2 * HIDDEN.nbytes
    assert batch_and_product < outputs < batch_and_product + HIDDEN.nbytes <= both


def test_a_profiler_of_the_users_own_is_left_alone() -> None:
    engine = engine_for(Hidden(), precision="fp32", activations="keep")
    assert profiled(engine, (HIDDEN,)) > engine.ledger.peak_nbytes + HIDDEN.nbytes / 2  # nothing was weighed, nor remembered
    engine.step(HIDDEN)
    assert profiled(engine, (HIDDEN,)) == pytest.approx(engine.ledger.peak_nbytes, rel=0.02)


@pytest.mark.parametrize(("late", "peak"), [(700, 12_000), (2_000, 16_000)])
def test_code_metered_as_one_operator_counts_the_same_bytes(late: int, peak: int) -> None:
    """The first time it is metered operator by operator. It empties what it is given before it makes its last buffer."""

    def over(_: bool) -> None:
        raise AssertionError("there is room")

    def move(given: torch.Tensor) -> torch.Tensor:
        stage, out = torch.empty(500), torch.empty(1_500)
        out[:1_000].copy_(given)
        given.untyped_storage().resize_(0)
        last = torch.empty(late)
        del stage, last
        return out

    ledger, found = Ledger(tier="cpu"), []
    meter = CpuMeter(ledger, 1 << 20, over)
    with meter:
        for _ in range(3):
            given = torch.zeros(1_000)
            ledger.reset_peak()
            meter.reset_peak()
            out = meter.as_one("move", given, partial(move, given), "moved", "scratch")
            found.append((ledger.live_peak.nbytes, ledger.peak.nbytes, {**ledger.now}, meter.live_nbytes, meter.reset_peak()))
            del given, out
            assert not ledger.total_nbytes
    assert found == [found[0]] * 3
    assert found[0][:2] == (peak, peak)
    assert found[0][2]["moved"] == found[0][3] == 6_000
    assert meter.as_one("other", torch.zeros(3), lambda: torch.zeros(4), "moved", "scratch").numel() == 4  # outside of a step
    assert not ledger.total_nbytes


def test_what_takes_more_than_the_budget_as_one_operator_does_not_run() -> None:
    class OverError(Exception):
        pass

    def over(_: bool) -> None:
        raise OverError

    ran = []

    def move() -> torch.Tensor:
        ran.append(1)
        return torch.empty(1_000)

    meter = CpuMeter(Ledger(tier="cpu"), 1 << 20, over)
    with meter:
        given = torch.zeros(1)
        meter.as_one("move", given, move, "moved", "scratch")
        with meter.allowing(2_000), pytest.raises(OverError):
            meter.as_one("move", given, move, "moved", "scratch")
    assert ran == [1]


def test_a_collective_is_profiled_once() -> None:
    """Whatever the group's object, the peer and the tag."""
    send = torch.ops.c10d.send.default
    one, other = (op_profile.signature_of(send, ([torch.zeros(4)], object(), peer, tag), {}) for peer, tag in ((1, 5), (2, 7)))
    assert one == other
    assert one != op_profile.signature_of(send, ([torch.zeros(5)], object(), 1, 5), {})
