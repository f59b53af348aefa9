"""Weights that other ranks have updated are gathered before their next use. That stays below the plan's peak, also where one
weight takes more than there is room for."""

from __future__ import annotations

import pytest

from scrimp import rehearse
from tests.run import models
from tests.run.check import MOST
from tests.run.plans import plan_of


@pytest.mark.parametrize("way", ["zero-1-full", "zero-1"])
def test_a_large_weight_arrives_in_parts(way: str) -> None:
    plan, (args, _) = plan_of("vit-256", "x=4", way, "sgd"), models.batch("vit-256")
    found = rehearse(plan, models.build("vit-256"), args)
    assert found.peak.nbytes <= MOST * plan.memory.peak_nbytes
