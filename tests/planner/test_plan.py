"""Plans: near the least that can be, counted again by other code, saved and loaded, and refused with reasons."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch

from scrimp import Cluster, FitError, Mesh, Plan, PlanError, ScrimpError, plan, zoo
from scrimp._arguments import WAYS
from scrimp.layout import Layout
from tests.support import capture_models

BATCH = 64


def plan_for(name: str, mesh: str, devices: int = 8, objective: str = "memory", **others: object) -> Plan:
    with torch.device("meta"):
        model = zoo.build(name)
    return plan(model, zoo.example_batch(name, BATCH), f"{devices}xA100-80", mesh=mesh, objective=objective, **others)  # type: ignore[arg-type]


@cache
def planned(name: str, mesh: str, objective: str = "memory", saving: tuple[str, ...] = ("keep",)) -> Plan:
    return plan_for(name, mesh, objective=objective, activations=saving)


def recounted(found: Plan) -> int:
    """The peak once more, from the plan's layouts and the graph alone: every storage while anybody reads it or a view of it,
    every copy in another layout while it is read, weights and states all the while. What is not kept is away between forward
    and backward; what is made again is all there, with what that takes, at a moment before its layer's backward."""
    graph, mesh = found.source.graph, found.mesh
    layers = [layer for layers in found.layers for layer in [layers] * layers.count]
    assert len(layers) == len(graph.layers)
    sizes = dict(mesh.axes)
    itemsize = {"bfloat16": 2, "float32": 4, "int64": 8, "bool": 1}
    steps = [(k, op, False) for k, layer in enumerate(graph.layers) for op in graph.graphs[layer.graph].ops if not op.backward]
    again = {}
    for k, layer in reversed([*enumerate(graph.layers)]):
        again[k] = len(steps) + len(again)
        steps += [(k, op, True) for op in graph.graphs[layer.graph].ops if op.backward]
    times = [at for at in range(len(steps) + len(again)) if at not in again.values()]

    def local(shape: tuple[int, ...], dtype: str, layout: str) -> int:
        return prod(shape) * itemsize[dtype] // prod(sizes[axis] for dim in Layout.parse(layout).dims for axis in dim)

    def origin(k: int, name: str) -> tuple[int, str]:
        """The layer and the name under which a tensor was made: borders and gradients come from other layers."""
        layer = graph.layers[k]
        its = graph.graphs[layer.graph]
        kinds = {value.name: value.kind for value in its.values}
        borders = [each for each in its.inputs if kinds[each] == "border"]
        if name in borders and layer.inputs[borders.index(name)].layer is not None:
            source = layer.inputs[borders.index(name)]
            return origin(source.layer, source.name)
        tangent = {incoming: output for output, incoming in its.tangents}.get(name)
        if tangent is not None and k + 1 < len(graph.layers):
            behind = graph.layers[k + 1]
            theirs = graph.graphs[behind.graph]
            kinds = {value.name: value.kind for value in theirs.values}
            inputs = [each for each in theirs.inputs if kinds[each] == "border"]
            at = next(j for j, source in enumerate(behind.inputs) if (source.layer, source.name) == (k, tangent))
            return k + 1, dict(theirs.gradients)[inputs[at]]
        return k, name

    planned_ops = [{op.name: op for op in layer.ops} for layer in layers]
    groups = [  # who shares a copy
        {part.model.graph.ops[member.op].name: g for g, group in enumerate(part.model.groups) for member in group.members}
        for part in found.source.assembly.parts
        for _ in range(part.count)
    ]
    born: dict[tuple[int, str], int] = {}
    reads: dict[tuple[int, str], list[tuple[int, bool]]] = {}
    ways: dict[tuple[int, str], str] = {}
    needed: dict[tuple[int, str], set[int]] = {}  # by layers that run again
    nbytes: dict[tuple[int, str], int] = {}
    made_as: dict[tuple[int, str], str] = {}
    copies: dict[tuple[tuple[int, str], str, bool, int, int], tuple[int, int, int]] = {}
    for at, (k, op, backward) in zip(times, steps, strict=True):
        values = {value.name: value for value in graph.graphs[graph.layers[k].graph].values}
        for name, layout in zip((name for name in op.outputs if name is not None), planned_ops[k][op.name].outputs, strict=True):
            value = values[name]
            made_as[k, name] = layout
            if value.storage == name:
                born[k, name], reads[k, name] = at, []
                ways[k, name] = "keep" if backward else planned_ops[k][op.name].saved
                nbytes[k, name] = local(value.shape, value.dtype, layout)
        for name, layout in zip(op.inputs, planned_ops[k][op.name].inputs, strict=True):
            source = origin(k, name)
            if source not in made_as:
                continue  # a weight, or of the batch
            theirs = {value.name: value for value in graph.graphs[graph.layers[source[0]].graph].values}
            root = (source[0], theirs[source[1]].storage)
            if root in reads:
                reads[root].append((at, backward))
            runs_again = not backward and planned_ops[k][op.name].saved == "recompute"
            if root in reads and runs_again:
                needed.setdefault(root, set()).add(k)
            before = Layout.parse(made_as[source])
            if Layout(dims=before.dims, factors=before.factors) != Layout.parse(layout):
                value = theirs[source[1]]
                key = (source, layout, backward, k, groups[k][op.name])
                first = copies.get(key, (at, at, 0))[0]
                copies[key] = (first, at, local(value.shape, value.dtype, layout))
                if runs_again:
                    copies[source, layout, True, -1 - k, groups[k][op.name]] = (
                        again[k],
                        again[k],
                        local(value.shape, value.dtype, layout),
                    )
    always = 0
    rates = {"bf16": (2, 12)}[found.precision]
    seen = set()
    for layer in found.layers:
        for weight in layer.weights:
            if weight.name in seen:
                continue
            seen.add(weight.name)
            shape = next(each.shape for each in graph.parameters if each.name == weight.name)
            used = prod(shape) // prod(sizes[axis] for dim in Layout.parse(weight.layout).dims for axis in dim)
            for rate, axes in zip(rates, (weight.weight_axes, weight.state_axes), strict=True):
                always += layer.count * rate * -(-used // prod(sizes[axis] for axis in axes))
    spans = [*copies.values()]
    for key, first in born.items():
        ahead = [at for at, backward in reads[key] if not backward]
        behind = [at for at, backward in reads[key] if backward]
        leaves = key[1] in graph.graphs[graph.layers[key[0]].graph].outputs
        runs_again = ways[key] == "recompute" and not leaves
        if runs_again:
            spans += [(first, max([first, *ahead]), nbytes[key]), (again[key[0]], max([again[key[0]], *behind]), nbytes[key])]
        elif ways[key] == "offload" and not leaves and behind:
            back = min([*behind, *(again[k] for k in needed.get(key, ()))])
            spans += [(first, max([first, *ahead]), nbytes[key]), (back, max(behind), nbytes[key])]
        else:
            later = [again[k] for k in needed.get(key, ()) if k != key[0] or not runs_again]
            spans.append((first, max([first, *ahead, *behind, *later]), nbytes[key]))
    return always + max(sum(size for first, end, size in spans if first <= at <= end) for at in range(len(times) + len(again)))


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
def test_other_code_counts_the_same_bytes(mesh: str, objective: str, saving: tuple[str, ...]) -> None:
    """But for the batch, and for weights that are gathered while they are used."""
    found = planned("gpt-tiny", mesh, objective, saving)
    batch = sum(kind.nbytes for kind in found.memory.kinds if kind.kind == "buffers")
    gathered = sum(
        2 * prod(next(each.shape for each in found.source.graph.parameters if each.name == weight.name))
        for layer in found.layers
        for weight in layer.weights
        if weight.weight_axes
    )
    again = recounted(found)
    assert again <= found.memory.peak_nbytes - batch <= again + gathered


@pytest.mark.parametrize("saving", [("keep",), WAYS])
def test_layers_that_choose_together_are_counted_one_by_one(saving: tuple[str, ...]) -> None:
    """Groups of 2 and more: the other code knows nothing of groups, and looks at every layer."""
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", layers=5)
    found = plan(model, zoo.example_batch("gpt-tiny", BATCH), "8xA100-80", mesh="x=8", activations=saving)
    assert max(layers.count for layers in found.layers) == 2
    batch = sum(kind.nbytes for kind in found.memory.kinds if kind.kind == "buffers")
    assert recounted(found) == found.memory.peak_nbytes - batch


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
    fields = {field.name for field in dataclasses.fields(Plan)} - {"source"}
    assert data.keys() == fields | {"format", "version"}
