"""Plans on gloo ranks: the numbers of one process, and the bytes of the plan, staging of moves included."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch

from scrimp import Mesh, Plan, plan, zoo
from scrimp.capture import to_json
from scrimp.ext.ranks import pool
from scrimp.planner.baselines.compare import baseline_plan
from tests.support.lowering.run import Ran, plainly, worst_of

WIDE = {"dim": 256, "layers": 2}
CASES = [
    ("gpt-tiny", {}, "x=2,y=2", "least"),
    ("gpt-tiny", {}, "x=2", "zero-2"),
    ("gpt-tiny", WIDE, "x=2,y=2", "tp-sp"),
    ("gpt-tiny", WIDE, "x=4", "zero-3-full"),
    ("gpt-tiny", {}, "x=2,y=2,z=2", "least"),
    ("llama-tiny", WIDE, "x=2,y=2", "least"),
    ("llama-tiny", WIDE, "x=2,y=2", "tp-sp-dist-opt"),
    ("llama-tiny", {}, "x=4", "keep"),
    ("bert-tiny", WIDE, "x=2,y=2", "zero-1"),
    ("bert-tiny", WIDE, "x=2,y=2", "tp-sp-full"),
    ("bert-tiny", {}, "x=4", "least"),
    ("vit-tiny", {}, "x=2,y=2", "tp"),
    ("vit-tiny", {}, "x=4", "recompute"),
    ("resnet-tiny", {}, "x=2,y=2", "least"),
    ("resnet-tiny", {}, "x=4", "zero-3"),
    ("vgg-tiny", {}, "x=2,y=2", "offload"),
    ("moe-tiny", {}, "x=2,y=2", "least"),
    ("moe-tiny", {}, "x=4", "ddp-full"),
    ("moe-tiny", {**WIDE, "experts": 8, "expert_parallel": 4}, "x=4", "least"),
]
OWN: dict[str, dict[str, Any]] = {
    "least": {},
    "keep": {"activations": {"keep"}},
    "recompute": {"activations": {"keep", "recompute"}},
    "offload": {"activations": {"keep", "offload"}},
    "fast": {"objective": "time"},
}
ROWS = 8


def planned(name: str, settings: dict[str, Any], mesh: str, way: str) -> Plan:
    """Once for all tests of a process."""
    return _planned(name, tuple(settings.items()), mesh, way)


@cache
def _planned(name: str, sizes: tuple[tuple[str, Any], ...], mesh: str, way: str) -> Plan:
    settings = dict(sizes)
    model, batch = zoo.build(name, **settings), zoo.example_batch(name, ROWS, **settings)
    cluster = f"{Mesh.parse(mesh).size}xCPU"
    if way not in OWN:
        return baseline_plan(model, batch, cluster, way, mesh=mesh, precision="fp32", seconds=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plan(model, batch, cluster, mesh=mesh, precision="fp32", time_limit=2, gap=0.05, **OWN[way])


@pytest.mark.parametrize(("name", "settings", "mesh", "way"), CASES)
def test_ranks_give_the_numbers_and_the_bytes_of_the_plan(name: str, settings: dict[str, Any], mesh: str, way: str) -> None:
    found = planned(name, settings, mesh, way)
    torch.manual_seed(0)
    wanted = plainly(zoo.build(name, **settings), zoo.example_batch(name, ROWS, **settings))
    job = "tests.rank_jobs.lowered:step"
    ran = pool(found.mesh.size).run(job, found.to_json(), to_json(found.source.graph), name, settings, ROWS)
    for loss, gradients, _, _ in ran:
        assert loss == pytest.approx(wanted.loss, rel=1e-6)
        assert worst_of(Ran(loss, gradients), wanted) < (1e-5, "")
    peak, where = max((nbytes, at) for _, _, nbytes, at in ran)
    least = 0.98 if settings else 0.95
    assert least * found.memory.peak_nbytes <= peak <= 1.01 * found.memory.peak_nbytes, f"{where}, planned {found.memory.where}"


def test_ranks_with_other_steps_are_named_on_every_rank() -> None:
    said = pool(4).run("tests.rank_jobs.lowered:disagree", "x=2,y=2")
    assert said == [said[0]] * 4
    assert said[0].startswith("ranks 3 run other steps than rank 0")
