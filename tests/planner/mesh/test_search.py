"""Plans on meshes with too many ways to split for all of them to be looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scrimp import Cluster, Mesh, zoo
from scrimp.planner.api import captured
from scrimp.planner.cost.zero_levels import precision_of
from scrimp.planner.deadline import Deadline
from scrimp.planner.formulation.on_mesh import Layers, OnMesh
from scrimp.planner.mesh import search
from scrimp.planner.mesh.relaxation_bound import bound_on
from scrimp.planner.mesh.search import Request, best_on, merged_meshes
from scrimp.planner.solver.evaluate import evaluate

SHAPE = {"dim": 32, "heads": 4, "layers": 2, "seq": 16, "vocab": 64}
CLUSTER = Cluster.preset("8xA100-80")


@pytest.fixture(scope="module")
def layers() -> Layers:
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", **SHAPE)
    precision = precision_of("bf16", "adamw")
    assert precision is not None
    return Layers(captured(model, zoo.example_batch("gpt-tiny", 8, **SHAPE), precision))


def request(objective: str = "memory", limit: int | None = None) -> Request:
    precision = precision_of("bf16", "adamw")
    assert precision is not None
    return Request(
        precision=precision, ways=("keep",), objective=objective, limit_nbytes=limit, gap=0.02, deadline=Deadline.after(60),
        say=lambda words: None,
    )  # fmt: skip


def test_neighbouring_axes_become_one() -> None:
    found = [(str(mesh), at) for mesh, at in merged_meshes(Mesh({"x": 8, "y": 4, "z": 2}))]
    assert found == [("x=32,z=2", (0, 0, 1)), ("x=8,y=8", (0, 1, 1))]


@pytest.mark.parametrize("objective", ["memory", "time"])
def test_near_what_is_best_on_fewer_axes_is_as_good_as_all(
    layers: Layers, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two axes all ways can be looked at: from one axis, the search comes to the same, and its bound is below that."""
    mesh = Mesh({"x": 4, "y": 2})
    exact = best_on(layers, CLUSTER, mesh, request(objective))
    monkeypatch.setattr(search, "MOST", 8)
    found = best_on(layers, CLUSTER, mesh, request(objective))
    one, other = evaluate(found.problem, found.solution.choice), evaluate(exact.problem, exact.solution.choice)
    assert len(found.problem.nodes) == len(exact.problem.nodes)
    assert sum(len(node.options) for node in found.problem.nodes) < sum(len(node.options) for node in exact.problem.nodes)
    if objective == "memory":
        assert found.bound <= other.peak_nbytes <= one.peak_nbytes <= 1.02 * other.peak_nbytes
    else:
        assert found.bound <= other.seconds <= one.seconds * 1.02
        assert one.seconds <= 1.02 * other.seconds


def test_three_axes(layers: Layers) -> None:
    """Never worse than on the meshes it began with: what they choose can be chosen here."""
    mesh = Mesh({"x": 2, "y": 2, "z": 2})
    found = best_on(layers, CLUSTER, mesh, request())
    assert found.assembly.moves.mesh == mesh
    for fewer, _ in merged_meshes(mesh):
        assert found.solution.peak_nbytes <= best_on(layers, CLUSTER, fewer, request()).solution.peak_nbytes
    assert found.bound <= found.solution.peak_nbytes <= 1.1 * found.bound


def test_the_bound_is_below_every_plan(layers: Layers) -> None:
    mesh = Mesh({"x": 4, "y": 2})
    for ways in (("keep",), ("keep", "recompute", "offload")):
        exact = best_on(layers, CLUSTER, mesh, replace(request(), ways=ways))
        bound = bound_on(OnMesh(layers, CLUSTER, mesh), request().precision, ways)
        assert 0.8 * exact.solution.peak_nbytes <= bound <= exact.solution.peak_nbytes


def test_the_bound_is_below_plans_whose_layers_choose_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts of one layer each, which is the whole problem."""
    shape = {**SHAPE, "layers": 5}
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", **shape)
    deep, mesh = Layers(captured(model, zoo.example_batch("gpt-tiny", 8, **shape), request().precision)), Mesh({"x": 4, "y": 2})
    bound = bound_on(OnMesh(deep, CLUSTER, mesh), request().precision, ("keep",))
    monkeypatch.setattr("scrimp.planner.shard.layer_runs.halves", lambda length: (1,) * length)
    free = best_on(deep, CLUSTER, mesh, request())
    assert {part.count for part in free.assembly.parts} == {1}
    assert 0.8 * free.solution.peak_nbytes <= bound <= free.solution.peak_nbytes
