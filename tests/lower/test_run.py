"""A step of a lowered model: random numbers by tile, the same for replicas and for a recompute; gradients that meet."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import Plan, plan
from scrimp.lower import Interpreter, Lowered, Shards, cut, later_axes, lower
from tests.support.lowering.run import batch_of, tensors_of
from tests.support.lowering.threads import ThreadRank, on_threads


class Dropping(nn.Module):
    """The loss is linear in what is kept: its gradient tells the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.second(self.dropout(self.first(x))), y)


def planned(model: nn.Module, batch: Any, **settings: Any) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(model, batch, "4xCPU", mesh="x=2,y=2", precision="fp32", time_limit=1, **settings)


def stepped(lowered: Lowered, model: nn.Module, batch: Any, seed: int) -> list[tuple[float, dict[str, torch.Tensor]]]:
    def job(comm: ThreadRank) -> tuple[float, dict[str, torch.Tensor]]:
        shards = Shards(lowered.rest, comm, tensors_of(model), later_axes((lowered,), accumulated=False))
        given = batch_of(lowered.graph, batch)
        part = {name: cut(each, lowered.batch[name], comm.mesh, comm.rank).clone() for name, each in given.items()}
        loss = Interpreter(lowered, comm, shards, seed=seed).step(part)
        return float(loss), {name: shards.whole_gradient(name) for name in shards.gradients}

    return on_threads(lowered.mesh, job)


@pytest.mark.parametrize("ways", [{"keep"}, {"keep", "recompute"}])
def test_dropout_is_drawn_by_tile_and_is_the_same_for_a_seed(ways: set[str]) -> None:
    """Replicas draw alike, which the communicator of the tests checks at every move; another seed draws other numbers."""
    torch.manual_seed(0)
    model, batch = Dropping(), (torch.randn(32, 16), torch.randn(32, 16))
    lowered = lower(found := planned(model, batch, activations=ways), found.source.graph)
    one, again, other = (stepped(lowered, model, batch, seed) for seed in (1, 1, 2))
    assert [loss for loss, _ in one] == [one[0][0]] * 4 == [loss for loss, _ in again]
    for (_, a), (_, b) in zip(one, again, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert one[0][0] != other[0][0]


def test_a_recompute_draws_the_numbers_of_the_first_time() -> None:
    """The same splits with everything kept and with everything recomputed give the same gradients."""
    torch.manual_seed(0)
    model, batch = Dropping(), (torch.randn(32, 16), torch.randn(32, 16))
    kept = planned(model, batch, activations={"keep"})
    from dataclasses import replace

    again = replace(
        kept,
        layers=tuple(
            replace(layers, groups=tuple(replace(group, saved="recompute") for group in layers.groups)) for layers in kept.layers
        ),
    )
    (loss, one), (other_loss, other) = (
        stepped(lower(each, kept.source.graph), model, batch, seed=3)[0] for each in (kept, again)
    )
    assert loss == other_loss
    assert all(torch.equal(one[name], other[name]) for name in one)
