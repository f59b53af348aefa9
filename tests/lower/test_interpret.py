"""Plans run on all ranks of a mesh as one process would: the loss, every gradient, and no more bytes than the plan promised.

Ranks are threads, and moves take no memory besides their result: `test_ranks.py` has real ones."""

from __future__ import annotations

import warnings
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import Mesh, Plan, PlanError, plan, zoo
from scrimp.planner import BASELINES
from scrimp.planner.baselines.compare import baseline_plan
from tests.support.lowering.run import Ran, drawn, on_all_ranks, plainly, worst_of

NAMES = [name for name in zoo.names() if "tiny" in name]
WAYS: dict[str, dict[str, Any]] = {
    "least": {},
    "kept": {"activations": {"keep"}},
    "recomputed": {"activations": {"keep", "recompute"}},
    "offloaded": {"activations": {"keep", "offload"}},
    "fast": {"objective": "time"},
}


@cache
def model_of(name: str) -> tuple[nn.Module, Any, Ran]:
    torch.manual_seed(0)
    model, batch = zoo.build(name), zoo.example_batch(name, 8)
    return model, batch, plainly(model, batch)


@cache
def planned(name: str, mesh: str, way: str) -> Plan:
    model, batch, _ = model_of(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(
            model, batch, f"{Mesh.parse(mesh).size}xCPU", mesh=mesh, precision="fp32", time_limit=2, gap=0.05, **WAYS[way]
        )


def check(name: str, found: Plan) -> None:
    model, batch, wanted = model_of(name)
    graph = planned(name, str(found.mesh), "least").source.graph if found.source is None else found.source.graph
    ran = on_all_ranks(found, graph, model, batch)
    for each in ran:
        assert each.loss == pytest.approx(wanted.loss, rel=1e-6)
        assert worst_of(each, wanted) < (1e-5, "")
    measured = max(each.peak_nbytes for each in ran)
    where = next(each.where for each in ran if each.peak_nbytes == measured)
    assert measured <= 1.01 * found.memory.peak_nbytes, f"at {where}, planned {found.memory.where}"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", ["x=4", "x=2,y=2", pytest.param("x=2,y=2,z=2", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", NAMES)
def test_plans_give_the_numbers_and_the_bytes(name: str, mesh: str, way: str) -> None:
    check(name, planned(name, mesh, way))


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny"])
def test_baselines_do_too(name: str, baseline: str) -> None:
    model, batch, _ = model_of(name)
    if baseline.endswith("selective"):
        with pytest.raises(PlanError, match="selective recompute is of the scores"):  # which flash attention does not save
            baseline_plan(model, batch, "4xCPU", baseline, mesh="x=2,y=2", precision="fp32", seconds=3)
        return
    check(name, baseline_plan(model, batch, "4xCPU", baseline, mesh="x=2,y=2", precision="fp32", seconds=3))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "moe-tiny", "vit-tiny"])
def test_choices_drawn_at_random_do_too(name: str, seed: int) -> None:
    check(name, drawn(planned(name, "x=2,y=2", "least"), Random(seed)))
