"""The memory benchmark: the DGC layout against its formula, the meter against sizes that are known, searches, rows and page."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.memory import command as memory
from bench.memory import page as memory_page
from bench.memory import run as memory_run
from bench.memory.case import DENSITY, Case
from bench.memory.contenders import DGC, PLAIN, SCRIMP
from bench.memory.dgc import Dgc, largest
from bench.memory.meter import CudaPeak, most_mapped
from bench.memory.page import key_of, lower, page, tables, times_weights
from bench.memory.run import dgc_peak, trial
from bench.memory.search import Trial, downward, largest_batch, least

ONE = Case(small=True)
MACHINE = {"gpu": "none", "cpu": "b", "cores": "1", "torch": "2", "commit": "abc", "load": "0"}
MIB = 1 << 20


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 10))


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of something that can be learnt."""
    inputs = torch.randn(steps, 8, 40, generator=torch.Generator().manual_seed(1))
    return [(x, x[:, :10]) for x in inputs]


def by_formula(steps: int, *, lr: float, density: float) -> dict[str, torch.Tensor]:
    """u = m*u + g; v = v + u; what is largest in v is sent, and gone from both. Vectors are not compressed."""
    model = model_of()
    weights = dict(model.named_parameters())
    u = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    v = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for x, y in batches(steps):
        loss = (model(x) - y).square().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            u[name] = 0.9 * u[name] + gradient
            sent = u[name]
            if weight.dim() > 1:
                v[name] = v[name] + u[name]
                order = v[name].flatten().abs().argsort(descending=True)
                chosen = torch.zeros(weight.numel(), dtype=torch.bool)
                chosen[order[: ceil(density * weight.numel())]] = True
                chosen = chosen.view_as(weight)
                sent = torch.where(chosen, v[name], 0.0)
                v[name], u[name] = torch.where(chosen, 0.0, v[name]), torch.where(chosen, 0.0, u[name])
            with torch.no_grad():
                weight -= lr * sent
    return {name: weight.detach() for name, weight in weights.items()}


@pytest.mark.parametrize("density", [0.02, 1.0])
def test_the_dgc_layout_trains_by_the_formula(density: float) -> None:
    model = model_of()
    dgc, losses = Dgc(model, lr=0.05, density=density, sample=1.0), []
    for x, y in batches(60):
        loss = (model(x) - y).square().mean()
        loss.backward()
        dgc.step()
        losses.append(loss.item())
    for name, wanted in by_formula(60, lr=0.05, density=density).items():
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), wanted, rtol=1e-5, atol=1e-6)
    assert sum(losses[-5:]) < sum(losses[:5])


def test_the_dgc_layout_goes_when_it_is_let_go() -> None:
    """Or the next trial of a search would be metered with it."""
    model = model_of()
    dgc, weight = weakref.ref(Dgc(model, lr=0.05)), weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert dgc() is None
    assert weight() is None


def test_the_dgc_layout_in_bf16_keeps_masters_and_the_norms() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))
    dgc = Dgc(model, lr=0.05, dtype=torch.bfloat16)
    before = [kept.master.clone() for kept in dgc._kept.values()]
    model(torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)).square().mean().backward()
    dgc.step()
    assert {weight.dtype for weight in model[1].parameters()} == {torch.float32}
    assert {weight.dtype for part in (model[0], model[3]) for weight in part.parameters()} == {torch.bfloat16}
    for weight, kept in dgc._kept.items():
        assert weight.grad is not None
        assert not weight.grad.any()
        assert torch.equal(weight, kept.master.to(weight.dtype))
    assert any(not torch.equal(kept.master, first) for kept, first in zip(dgc._kept.values(), before, strict=True))


def test_a_sampled_threshold_finds_about_as_many_as_wanted_and_never_more() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    found = largest(values, density=0.01, sample=0.01)
    assert 1200 < len(found) <= 2000
    assert len(found.unique()) == len(found)
    outside = values.abs().index_fill(0, found, 0)
    assert values[found].abs().median() > outside.max() * 0.9


def test_the_meter_sees_what_another_thread_allocates_and_what_is_gone() -> None:
    """In a process of its own, as always: the mark cannot be set back."""
    code = """
import threading, torch
from bench.memory.meter import MappedPeak
meter, kept = MappedPeak(), []
torch.ones(3 << 20); torch.ones(3 << 20)
def work(): kept.append(torch.ones(2 << 20)); kept.append(torch.ones(2 << 20))
thread = threading.Thread(target=work); thread.start(); thread.join()
kept.pop()
print(meter.nbytes())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 16 * MIB <= int(out.stdout) < 16.5 * MIB


def test_a_peak_on_cuda_outlives_what_others_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"live": 0, "peak": 0}

    def live(nbytes: int) -> None:
        now.update(live=nbytes, peak=max(now["peak"], nbytes))

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: now["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: now.update(peak=now["live"]))
    live(90)
    live(10)
    meter = CudaPeak()
    live(50)
    live(20)
    torch.cuda.reset_peak_memory_stats("cuda")
    live(30)
    assert now["peak"] == 30
    assert meter.nbytes() == 50
    meter.restart()
    assert meter.nbytes() == 30


def test_what_the_c_library_says() -> None:
    assert most_mapped("Total (incl. mmap):\nmax mmap regions = 5\nmax mmap bytes   =   12345\n") == 12345
    with pytest.raises(RuntimeError, match="mapped"):
        most_mapped("something else")


def attempts(need: Callable[[int], int]) -> Callable[[int, int], Trial]:
    """A step that needs so much with so many micro-batches, and takes what it is given, but for a tenth."""

    def attempt(budget: int, accumulate: int) -> Trial:
        peak = max(need(accumulate), int(0.9 * budget)) if need(accumulate) <= budget else None
        return Trial(budget_nbytes=budget, batch=32, accumulate=accumulate, peak_nbytes=peak)

    return attempt


def test_budgets_go_down_and_micro_batches_up_until_nothing_is_left() -> None:
    found = downward(attempts(lambda parts: 100 + 3200 // parts), 8000, most_accumulate=32, late=lambda: False)
    best = least(found)
    assert best is not None
    assert best.peak_nbytes is not None
    assert best.accumulate == 32
    assert 200 <= best.peak_nbytes <= 200 / 0.85
    assert found[-1].peak_nbytes is None
    assert least([trial for trial in found if trial.peak_nbytes is None]) is None
    late = downward(attempts(lambda parts: 100), 8000, most_accumulate=32, late=lambda: True)
    assert [trial.budget_nbytes for trial in late] == [8000]


@pytest.mark.parametrize(("truth", "start"), [(0, 8), (1, 8), (7, 8), (8, 8), (100, 8), (1000, 8)])
def test_the_largest_batch(truth: int, start: int) -> None:
    found = largest_batch(lambda n: n <= truth, start, late=lambda: False)
    assert truth * 15 / 16 <= found <= truth
    assert largest_batch(lambda n: n <= 1000, 8, late=lambda: True) == 8


def test_a_step_and_a_batch_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine that takes 10 and an image's share of 1, and once breaks."""

    def fake(case: Case, budget: int, batch: int, accumulate: int) -> Trial:
        assert batch % accumulate == 0
        peak, why = 10 + batch // accumulate, "RunError: broken" if accumulate == 16 else ""
        why = why or ("" if peak <= budget else "FitError: too much")
        given = {"budget_nbytes": budget, "batch": batch, "accumulate": accumulate}
        return Trial(**given, peak_nbytes=None if why else peak, why=why)

    monkeypatch.setattr(memory_run, "trial", fake)
    case = Case(model_name="vgg16", small=True, precision="bf16", batch=32)
    found = memory_run.step(SCRIMP, case, {"peak_nbytes": 100}, 10)
    assert (found["peak_nbytes"], found["accumulate"]) == (11, 32)
    assert found["wrong"] == ["RunError: broken"]
    assert "WRONG: step, vgg16 bf16: RunError: broken" in tables([row_for("step", SCRIMP, case, **found)])
    assert "failed" in memory_run.step(SCRIMP, case, {"peak_nbytes": 10}, 10)
    found = memory_run.batch(SCRIMP, case, {"peak_nbytes": 60, "batch": 33}, 10)
    assert (found["batch"], found["wanted"], found["accumulate"]) == (49, 132, 4)
    found = memory_run.batch(SCRIMP, case, {"peak_nbytes": 60, "batch": 10}, 10)
    assert (found["wanted"], found["accumulate"]) == (40, 1)


def row_for(part: str, name: str, case: Case = ONE, **said: Any) -> dict[str, Any]:
    about = {"part": part, "contender": name, "case": asdict(case), "commit": "abc", "machine": MACHINE, "when": "2026"}
    return {**about, **said}


def rows_of() -> list[dict[str, Any]]:
    picture = replace(ONE, model_name="vgg16", precision="bf16", batch=32)
    tried = [
        Trial(budget_nbytes=500, batch=32, accumulate=2, peak_nbytes=190),
        Trial(budget_nbytes=150, batch=32, accumulate=4, peak_nbytes=None),
    ]
    tried += [Trial(budget_nbytes=150, batch=32, accumulate=8, peak_nbytes=140)]
    trials = [asdict(each) for each in tried]
    return [
        row_for("exchange", "DDP", peak_nbytes=420, weights_nbytes=100),
        row_for("exchange", "scrimp, int8 residual", peak_nbytes=241, weights_nbytes=100, ledger_nbytes=240, host_tier_nbytes=0),
        row_for("exchange", "scrimp, bf16 residual", peak_nbytes=265, weights_nbytes=100, ledger_nbytes=264, host_tier_nbytes=0),
        row_for("exchange", "scrimp, fp32 residual", skipped="not there yet"),
        row_for("step", DGC, picture, peak_nbytes=1000),
        row_for("step", SCRIMP, picture, peak_nbytes=140, accumulate=8, trials=trials),
        row_for("batch", DGC, picture, batch=33, budget_nbytes=1000),
        row_for("batch", SCRIMP, picture, batch=120, budget_nbytes=1000, wanted=132, accumulate=2, trials=[]),
    ]


def test_arithmetic_of_rows() -> None:
    rows = rows_of()
    assert times_weights(rows[0]) == pytest.approx(2.2)
    assert lower(rows[5], rows[4]) == pytest.approx(0.86)


def test_asked_and_seen_side_by_side() -> None:
    text = tables(rows_of())
    assert "| DDP | 2.200 |  |  | 420 B |  |  |" in text
    assert "| scrimp, int8 residual | 0.410 | 0.4 | NOT REACHED | 241 B | 240 B | 0 B |" in text
    assert "| scrimp, bf16 residual | 0.650 | 0.65 | reached |" in text
    assert "| scrimp, fp32 residual | not there yet | 1.15 |" in text
    assert f"| {DGC} | {memory_page.NOT_YET} |" in text
    assert "| vgg16 | bf16 | 1000 B | 140 B | 8 | 86.0% | 80.5% | reached | 2 |" in text
    assert "| vgg16 | bf16 | 1000 B | 33 | 120 | 3.64 | 4 | reached in micro-batches | 2 |" in text
    assert f"| resnet50 | bf16 | {memory_page.NOT_YET} |" in text


def test_the_page_is_of_the_newest_machine(tmp_path: Path) -> None:
    other = [{**row, "machine": {**MACHINE, "cpu": "older"}, "when": "2025", "peak_nbytes": 999} for row in rows_of()[:1]]
    text = page([*other, *rows_of()])
    assert "- cpu: b" in text
    assert "999" not in text
    (tmp_path / "abc.json").write_text(json.dumps({"commit": "abc", "rows": [*other, *rows_of()]}))
    memory_page.main(["--results", str(tmp_path), "--docs", str(tmp_path)])
    assert (tmp_path / "memory.md").read_text() == text
    assert memory_page.NOT_YET in page([])


def test_what_is_known_is_not_measured_again() -> None:
    rows = rows_of()
    found = memory.usable(rows, "abc", MACHINE)
    assert len(found) == len(rows) - 1  # what was skipped may be there by now
    assert key_of("exchange", "DDP", ONE) in found
    assert not memory.usable(rows, "def", MACHINE)
    assert not memory.usable(rows, "abc", {**MACHINE, "torch": "3"})


def test_waves_know_what_they_need() -> None:
    points = [*memory.points(memory.PARTS, device="cpu", small=True)]
    found = memory.waves(points)
    assert sorted(map(str, points)) == sorted(str(point) for wave in found for point in wave)
    places = {(part, name, case.model_name): k for k, wave in enumerate(found) for part, name, case in wave}
    for model in ("vgg16", "resnet50"):
        assert places["step", DGC, model] < places["step", SCRIMP, model]
        assert places["step", DGC, model] < places["batch", DGC, model] < places["batch", SCRIMP, model]


def test_nothing_is_compared_with_a_row_that_is_not_there() -> None:
    case = Case(model_name="vgg16", small=True, precision="bf16", batch=32)
    for part, name in [("step", SCRIMP), ("batch", DGC), ("batch", SCRIMP)]:
        assert "are missing" in memory.measure(part, name, case, {}, 1, 1)["skipped"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("DDP, bucket view", marks=pytest.mark.full),  # the next one is DDP with bucket views too
        "DDP, bucket view, PowerSGD rank 1",
        "scrimp, int8 residual",
    ],
)
def test_contenders_train(name: str, tmp_path: Path) -> None:
    """In a process of its own, as they are measured."""
    row = memory.measure("exchange", name, Case(small=True, layers=2, steps=3), {}, 1, 120)
    assert "failed" not in row, row
    assert row["losses"][-1] < row["losses"][0]
    assert row["peak_nbytes"] > 0


def test_a_whole_step_of_the_dense_engine_within_a_budget() -> None:
    case = Case(model_name="vgg16", small=True, precision="bf16", batch=8)
    theirs = dgc_peak(case, case.batch)
    inside = trial(case, theirs, case.batch, 1, sparse=None)
    assert inside.peak_nbytes is not None
    assert case.weights_nbytes() / 4 < inside.peak_nbytes < theirs
    outside = trial(case, case.weights_nbytes() // 4, case.batch, 8, sparse=None)
    assert outside.peak_nbytes is None
    assert "FitError" in outside.why


def test_a_run_writes_rows_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And its figures are what the sizes say: a gradient; a gradient, a residual, of one layer magnitudes and mask, and 12
    bytes for every entry that was sent."""
    wanted = {PLAIN: 1.0, DGC: 2 + 1 / 12}
    later = {PLAIN: 0.0, DGC: 0.25 / 12 + 12 * DENSITY / 4}  # at the peak or after it, as torch's version frees the magnitudes
    flags = ["--small", "--device", "cpu", "--results", str(tmp_path), "--commit", "abc", "--part", "exchange"]
    flags += [flag for name in wanted for flag in ("--contender", name)]
    assert memory.main(flags) == 0
    rows = json.loads((tmp_path / "abc.json").read_text())["rows"]
    for row in rows:
        least = wanted[row["contender"]]
        assert least - 0.01 <= times_weights(row) <= least + later[row["contender"]] + 0.01
    assert all(row["losses"][-1] < row["losses"][0] for row in rows)
    assert "times the weights" in capsys.readouterr().out
    assert memory.main(flags) == 0
    assert json.loads((tmp_path / "abc.json").read_text())["rows"] == rows
