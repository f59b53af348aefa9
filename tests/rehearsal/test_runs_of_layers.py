"""Layers that choose together, of which the planner models one: the others must not take more than it says."""

from __future__ import annotations

import warnings

import pytest
import torch

from scrimp import PlanWarning, plan, rehearse, zoo


@pytest.mark.parametrize("layers", [12, pytest.param(24, marks=pytest.mark.full)])
def test_no_layer_of_a_run_takes_more_than_planned(layers: int) -> None:
    settings = {"vocab": 50304, "layers": layers}
    with torch.device("meta"):
        model = zoo.build("gpt-175b", **settings)
    batch = zoo.example_on_meta("gpt-175b", 64, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # the search ends at its limit
        found = plan(model, batch, "64xA100-80", mesh="x=8,y=8", gap=0.05, time_limit=5)
    assert rehearse(found, model, batch).peak.nbytes <= 1.01 * found.memory.peak_nbytes
