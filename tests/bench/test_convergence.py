"""The convergence benchmark: its rules against torch's own optimizers, what waits against what came, and a run that resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from bench.convergence import command as convergence
from bench.convergence import tasks
from bench.convergence.rules import SPARSE, DenseAdam, DenseSGD, Exchange, Sending
from bench.convergence.tasks import SPACE, Spelt, TextTask

ALL = Sending(density=1.0, dtype=torch.float32, masking=False)
SIZES = (4096, 640)


def gradients(steps: int, workers: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(workers, sum(SIZES), generator=draw) ** 3 for _ in range(steps)]


def by_torch(optimizer: torch.optim.Optimizer, weight: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
    for one in found:
        weight.grad = one.mean(0)
        optimizer.step()
    return weight


@pytest.mark.parametrize("sparse", [False, True])
def test_sgd_is_torchs_if_all_is_sent(sparse: bool) -> None:
    found, weight = gradients(20, 4), torch.zeros(sum(SIZES))
    rule = SPARSE["SGD"](4, SIZES, ALL) if sparse else DenseSGD(sum(SIZES))
    mine = -sum(rule.step(one, 0.1) for one in found)
    torch.testing.assert_close(mine, by_torch(torch.optim.SGD([weight], 0.1, momentum=0.9), weight, found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_adam_of_one_worker_is_torchs_if_all_is_sent(sparse: bool) -> None:
    found, weight = gradients(20, 1), torch.zeros(sum(SIZES))
    rule = SPARSE["AdamW"](1, SIZES, ALL) if sparse else DenseAdam((sum(SIZES),))
    mine = -sum(rule.step(one, 0.1) for one in found)
    wanted = by_torch(torch.optim.AdamW([weight], 0.1, weight_decay=0.0), weight, found)
    torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("residual", "drift"), [("fp32", 1e-5), ("bf16", 0.02), ("int8", 0.15)])
def test_what_was_sent_and_what_waits_is_what_came(residual: str, drift: float) -> None:
    exchange = Exchange(4, SIZES, Sending(residual=residual))
    found = gradients(50, 4)
    sent = sum(exchange.add_and_send(one, torch.zeros_like(one), 1.0) for one in found)
    came = torch.stack(found).double().sum(0).mean(0)
    lost = came - sent - exchange._load().double().mean(0)
    assert lost.norm() <= drift * came.norm()
    assert (lost.norm() > 1e-5 * came.norm()) == (residual != "fp32")


def test_density_sinks_to_what_was_asked() -> None:
    sending = Sending(density=0.01, warm_density=0.25, warm_steps=10)
    densities = [sending.density_at(step) for step in range(12)]
    assert densities[0] == 0.25
    assert densities == sorted(densities, reverse=True)
    assert densities[10] == densities[11] == 0.01


def test_a_letters_entropy_is_that_of_its_text() -> None:
    """By counting what follows which word, in a text long enough; the spelling can be read back."""
    spelt = Spelt(words=8)
    text = spelt.text(40_000, seed=3)
    words = {tuple(int(letter) for letter in row if letter >= 0): number for number, row in enumerate(spelt.table)}
    found, start = [], 0
    for end in (text == SPACE).nonzero().flatten().tolist():
        found.append(words[tuple(text[start : end + 1].tolist())])
        start = end + 1
    assert found == spelt.grammar.tokens(40_000, seed=3).tolist()
    pairs = torch.zeros(8, 8, dtype=torch.float64)
    pairs.index_put_((torch.tensor(found[:-1]), torch.tensor(found[1:])), torch.ones((), dtype=torch.float64), accumulate=True)
    chance = pairs / pairs.sum(1, keepdim=True)
    surprise = -(pairs * torch.where(chance > 0, chance, 1).log()).sum()
    assert float(surprise / len(text)) == pytest.approx(spelt.entropy, rel=0.02)


@pytest.mark.full
def test_training_agrees_if_all_is_sent_and_suffers_if_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence, "POINTS", 1)
    task = TextTask()
    task.valid = task.valid[:256]
    dense, sparse = convergence.CONTENDERS[:2]

    def loss(contender: convergence.Contender, lr: float, steps: int) -> float:
        return float(convergence.train(task, contender, lr, 7, steps)["loss"])

    whole = replace(sparse, sending=replace(ALL, warm_density=1.0))
    assert loss(whole, 0.1, 10) == pytest.approx(loss(dense, 0.1, 10), rel=1e-5)
    kept = loss(sparse, 0.2, 80)
    lost = loss(replace(sparse, sending=Sending(residual="none")), 0.2, 80)
    assert lost > kept + 0.1


def test_a_run_is_resumed_and_written_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "VALID_IMAGES", 64)
    monkeypatch.setattr(convergence, "LR_GRID", {"SGD": (0.1, 1e30), "AdamW": (0.01,)})
    arguments = ["--task", "images", "--steps", "4", "--results", str(tmp_path / "rows.json"), "--docs", str(tmp_path)]
    for name in ("SGD, dense", "SGD, sparse"):
        arguments += ["--contender", name]
    convergence.main([*arguments, "--seeds", "1"])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["seed"] for row in rows] == [0, 0, 1, 0, 0, 1]
    assert [row["loss"] is None for row in rows] == [False, True, False] * 2
    capsys.readouterr()
    convergence.main([*arguments, "--seeds", "2"])
    text = capsys.readouterr().out
    assert text.count("seed 2") == 2
    assert "seed 1:" not in text
    page = (tmp_path / "convergence.md").read_text()
    assert "| SGD, sparse | 0.1 |" in page
    assert "SGD, sparse: accuracy worse by" in page
    ElementTree.fromstring((tmp_path / "convergence-images-sgd.svg").read_text())
