"""Parameters under a plan as DTensors: the values of the state dict, in the placements in use."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from scrimp import Engine, Mesh, RunError, plan, zoo
from scrimp.engine.lowered.dtensors import expressible, placements
from scrimp.planner import Placed
from tests.engine.lowered.test_planned_engine import plan_of, run
from tests.engine.lowered.test_planned_steps import ROWS

MESH = Mesh.parse("x=2,y=2,z=1")


@pytest.mark.parametrize(
    ("name", "mesh", "way"),
    [
        ("gpt-tiny", "x=2,y=2", "least"),
        ("gpt-tiny", "x=2,y=2", "tp"),
        pytest.param("gpt-tiny", "x=4", "zero-3", marks=pytest.mark.full),
        pytest.param("llama-tiny", "x=2,y=2", "tp-sp-dist-opt", marks=pytest.mark.full),
        pytest.param("resnet-tiny", "x=4", "zero-1", marks=pytest.mark.full),
    ],
)
def test_dtensors_are_the_state_dict(name: str, mesh: str, way: str) -> None:
    ran = run(4, "as_dtensors", plan_of(name, mesh, way), name, ROWS)
    for found in ran:
        assert {key for key, (full, again, _, on) in found.items() if not (full and again and on)} == set()
        assert {key: each[2] for key, each in found.items()} == {key: each[2] for key, each in ran[0].items()}
    if way == "tp":  # two layers of each block are split, one by rows and one by columns
        up, down = (ran[0][f"blocks.0.mlp.{which}.weight"][2] for which in ("up", "down"))
        assert {*up} | {*down} >= {"S(0)", "S(1)"}


@pytest.mark.parametrize(
    ("dims", "wanted", "whole"),
    [
        ((((8, ("x",)),), ((6, ()),)), "S(0) R R", False),
        ((((8, ("x", "y")),), ((6, ()),)), "S(0) S(0) R", False),
        ((((2, ("x",)), (4, ("y",))), ((6, ("z",)),)), "S(0) S(0) R", False),  # a tile of the first factor is one element
        ((((8, ("y",)),), ((6, ("x",)),)), "S(1) S(0) R", False),
        ((((8, ("y", "x")),), ((6, ()),)), "R R R", True),  # y is major
        ((((3, ()), (8, ("x",))), ((6, ("y",)),)), "R S(1) R", True),  # an inner factor
        ((((4, ("x",)), (4, ("y",))), ((6, ()),)), "R R R", True),
    ],
)
def test_what_dtensor_cannot_express_is_whole(dims: tuple, wanted: str, whole: bool) -> None:  # type: ignore[type-arg]
    place = Placed(dims)
    found = expressible(place, MESH)
    names = {"Shard(dim=0)": "S(0)", "Shard(dim=1)": "S(1)", "Replicate()": "R"}
    assert " ".join(names[repr(each)] for each in placements(found, MESH)) == wanted
    assert (found != place) is whole
    assert found.shape == place.shape


def test_one_rank_needs_a_process_group_and_every_engine_a_plan() -> None:
    model, batch = zoo.build("gpt-tiny"), zoo.example_batch("gpt-tiny", ROWS)
    with Engine(zoo.build("gpt-tiny"), precision="fp32", device="cpu") as plain, pytest.raises(RunError, match="has no plan"):
        plain.dtensors()
    found = plan(model, batch, "1xCPU", precision="fp32", time_limit=2)
    with Engine(model, plan=found, precision="fp32", device="cpu") as engine:
        with pytest.raises(RunError, match=r"there is none: call torch\.distributed\.init_process_group"):
            engine.dtensors()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            state = engine.state_dict()
            for name, each in engine.dtensors().items():
                assert each.full_tensor().equal(state[name])
        finally:
            dist.destroy_process_group()
