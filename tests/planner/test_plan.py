"""Plans: near the least that can be, counted again by other code, saved and loaded, and refused with reasons."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from scrimp import Cluster, FitError, Mesh, Plan, PlanError, ScrimpError, plan, zoo
from scrimp._arguments import WAYS
from tests.support import capture_models
from tests.support.lowering.rehearse import rehearsed

BATCH = 64


def plan_for(name: str, mesh: str, devices: int = 8, objective: str = "memory", **others: object) -> Plan:
    with torch.device("meta"):
        model = zoo.build(name)
    return plan(model, zoo.example_batch(name, BATCH), f"{devices}xA100-80", mesh=mesh, objective=objective, **others)  # type: ignore[arg-type]


@cache
def planned(name: str, mesh: str, objective: str = "memory", saving: tuple[str, ...] = ("keep",)) -> Plan:
    return plan_for(name, mesh, objective=objective, activations=saving)


@pytest.mark.parametrize("mesh", ["x=8", "x=2,y=4"])
def test_a_plan_of_the_least_memory_has_every_byte_once(mesh: str) -> None:
    found = planned("gpt-tiny", mesh)
    assert found.gap < 0.01
    assert found.whole == ()
    assert found.memory.peak_nbytes <= 1.1 * found.memory.floor_nbytes
    assert sum(kind.nbytes for kind in found.memory.kinds) == found.memory.peak_nbytes


@pytest.mark.parametrize(
    ("saving", "objective", "mesh"),
    [
        *product([("keep",), WAYS], ["memory", "time"], ["x=8"]),
        *product([("keep",), WAYS], ["time"], ["x=2,y=4"]),
        (("keep",), "memory", "x=2,y=4"),
        pytest.param(WAYS, "memory", "x=2,y=4", marks=pytest.mark.full),  # a search of 12 s
    ],
)
def test_a_rehearsal_holds_the_same_bytes(mesh: str, objective: str, saving: tuple[str, ...]) -> None:
    """One rank runs the lowered plan, and all storages that live are counted."""
    found = planned("gpt-tiny", mesh, objective, saving)
    assert 0.98 * found.memory.peak_nbytes <= rehearsed(found, found.source.graph) <= 1.001 * found.memory.peak_nbytes


@pytest.mark.parametrize("saving", [("keep",), WAYS])
def test_layers_that_choose_together_are_counted_one_by_one(saving: tuple[str, ...]) -> None:
    """Groups of 2 and more: a rehearsal knows nothing of groups, and runs every layer."""
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", layers=5)
    found = plan(model, zoo.example_batch("gpt-tiny", BATCH), "8xA100-80", mesh="x=8", activations=saving)
    assert max(layers.count for layers in found.layers) == 2
    assert 0.98 * found.memory.peak_nbytes <= rehearsed(found, found.source.graph) <= 1.001 * found.memory.peak_nbytes


def test_what_is_made_again_or_sent_away_takes_no_room() -> None:
    """Below the floor of what keeps everything, at the price of time; which ways there are can be said."""
    kept = planned("gpt-tiny", "x=8")
    free = planned("gpt-tiny", "x=8", "memory", WAYS)
    assert free.memory.peak_nbytes < 0.6 * kept.memory.floor_nbytes
    assert free.seconds > kept.seconds
    assert {op.saved for layer in free.layers for op in layer.ops} > {"keep"}
    for way in ("recompute", "offload"):
        one = planned("gpt-tiny", "x=8", "memory", ("keep", way))
        assert {op.saved for layer in one.layers for op in layer.ops} == {"keep", way}
        assert free.memory.peak_nbytes <= one.memory.peak_nbytes < kept.memory.peak_nbytes
    with pytest.raises(PlanError, match="activations="):
        plan_for("gpt-tiny", "x=8", activations=("recompute",))


def test_time_comes_before_memory_if_it_is_asked_to() -> None:
    least, fast = planned("gpt-tiny", "x=8", "memory", WAYS), planned("gpt-tiny", "x=8", "time", WAYS)
    assert fast.seconds < least.seconds
    assert fast.memory.peak_nbytes >= least.memory.peak_nbytes
    middle = plan_for("gpt-tiny", "x=8", objective="time", memory=2 * least.memory.peak_nbytes, gap=0.2)
    assert middle.memory.peak_nbytes <= 2 * least.memory.peak_nbytes
    assert fast.seconds <= middle.seconds <= least.seconds


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in zoo.names() if name.endswith("tiny")])
@pytest.mark.parametrize("mesh", ["x=8", "x=2,y=4", "x=2,y=2,z=2"])
def test_no_operator_of_the_zoo_is_kept_whole(name: str, mesh: str) -> None:
    found = planned(name, mesh)
    assert found.whole == ()
    assert found.memory.peak_nbytes <= 1.1 * found.memory.floor_nbytes


@pytest.mark.full
@pytest.mark.parametrize("family", capture_models.FAMILIES)
@pytest.mark.parametrize("mesh", ["x=8", "x=2,y=4"])
def test_no_operator_of_hugging_face_is_kept_whole(family: str, mesh: str) -> None:
    pytest.importorskip("transformers")
    found = plan(capture_models.build(family), capture_models.batch(family, 8), "8xA100-80", mesh=mesh, activations=("keep",))
    assert found.whole == ()
    assert found.memory.peak_nbytes <= 1.1 * found.memory.floor_nbytes


def test_the_mesh_is_searched_for() -> None:
    with torch.device("meta"):
        model = zoo.build("vgg-tiny")
    told: list[str] = []
    batch, keep = zoo.example_batch("vgg-tiny", BATCH), ("keep",)
    found = plan(model, batch, Cluster.preset("4xA100-80"), activations=keep, progress=told.append)
    assert found.mesh.size == 4
    assert len(told) > 2
    others = [plan(model, batch, "4xA100-80", mesh=mesh, activations=keep) for mesh in ("x=4", "x=2,y=2")]
    assert found.memory.peak_nbytes == min(other.memory.peak_nbytes for other in others)


def test_a_plan_is_saved_and_loaded(tmp_path: Path) -> None:
    found = planned("gpt-tiny", "x=2,y=4")
    found.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == found
    assert again.summary() == found.summary()
    assert again.mesh == Mesh({"x": 2, "y": 4})
    (tmp_path / "plan.json").write_text("no plan")
    with pytest.raises(PlanError, match="not a plan file of scrimp"):
        Plan.load(tmp_path / "plan.json")


def test_what_cannot_be_is_refused_with_reasons() -> None:
    with pytest.raises(FitError, match="KiB"):
        plan_for("gpt-tiny", "x=8", memory="10KiB")
    with pytest.raises(PlanError, match="precision='fp8'"):
        plan_for("gpt-tiny", "x=8", precision="fp8")
    with pytest.raises(PlanError, match="objective='speed'"):
        plan_for("gpt-tiny", "x=8", objective="speed")
    with pytest.raises(ScrimpError, match="16 devices"):
        plan_for("gpt-tiny", "x=16")
    with pytest.raises(ScrimpError, match="A100-80"):
        plan(torch.nn.Linear(1, 1), (), "8xA1000")


def test_a_plan_file_has_what_can_be_read_again_and_nothing_of_the_search() -> None:
    data = json.loads(planned("gpt-tiny", "x=8").to_json())
    fields = {field.name for field in dataclasses.fields(Plan)} - {"source", "reserve"}  # a plan without a reserve has none
    assert data.keys() == fields | {"format", "version"}
