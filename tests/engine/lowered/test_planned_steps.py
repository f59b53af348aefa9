"""Training under a plan: the losses and weights of one process with plain PyTorch, and the bytes of the plan by the ledger.

A pairwise sample of the cases of `make test-run` (`tests/run`), with fewer steps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scrimp import SGD, AdamW, zoo
from tests.run.cases import Case, sample
from tests.run.check import run

ROWS, STEPS = 8, 3


def plainly(name: str, settings: dict[str, object], optimizer: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = zoo.build(name, **settings)
    if optimizer == "adamw":
        own: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=AdamW().weight_decay)
    else:
        own = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=SGD(lr=1.0).weight_decay)
    losses = []
    for step in range(steps):
        found = model(*zoo.example_batch(name, ROWS, step=step, **settings))
        loss = found if isinstance(found, torch.Tensor) else found["loss"]
        own.zero_grad()
        loss.backward()
        own.step()
        losses.append(float(loss.detach()))
    return losses, {key: each.detach() for key, each in model.state_dict().items()}


def marked(case: Case) -> Any:
    """Eight processes that each load transformers and capture a model of it take longest: with `--full`."""
    largest = case.model.startswith("hf-") and case.mesh.count("=") == 3
    return pytest.param(case, marks=pytest.mark.full) if largest else case


@pytest.mark.parametrize("case", [*map(marked, sample())], ids=str)
def test_a_plan_trains_as_one_process(case: Case) -> None:
    if case.model.startswith("hf-"):
        pytest.importorskip("transformers")
    verdict = run(case, STEPS)
    assert not verdict.no_plan
    assert not verdict.faults
    assert len(verdict.peaks) > 1
