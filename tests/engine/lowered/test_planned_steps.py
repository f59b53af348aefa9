"""Training under a plan: the losses and weights of one process with plain PyTorch, and the bytes of the plan by the ledger."""

from __future__ import annotations

import pytest
import torch

from scrimp import SGD, AdamW, zoo
from scrimp.ext.ranks import pool
from tests.lower.test_ranks import CASES, planned

ROWS, STEPS = 8, 3
JOB = "tests.rank_jobs.planned_engine:train"


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


@pytest.mark.parametrize(("name", "settings", "mesh", "way"), CASES)
def test_a_plan_trains_as_one_process(name: str, settings: dict[str, object], mesh: str, way: str) -> None:
    plan = planned(name, settings, mesh, way)
    wanted, _ = plainly(name, settings, plan.optimizer, STEPS)
    ran = pool(plan.mesh.size).run(JOB, plan.to_json(), name, settings, ROWS, STEPS)
    for losses, _, _ in ran:
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert losses == ran[0][0]
    peak = max(ledger["peak"] for _, _, ledger in ran)
    least = 0.98 if settings else 0.95
    assert least * plan.memory.peak_nbytes <= peak <= 1.01 * plan.memory.peak_nbytes, [ledger["kinds"] for _, _, ledger in ran]
