"""Known parallelisms as plans: where their weights are, their bytes by hand and counted again, and what cannot be made is said.

Their published formulas are in test_planner_closed_forms.py."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from scrimp import Cluster, Mesh, Plan, PlanError, plan, zoo
from scrimp._arguments import KEEP
from scrimp.capture import Graph
from scrimp.planner import solve
from scrimp.planner.api import captured
from scrimp.planner.baselines.compare import BASELINES, Drawn, baseline_plan, compare, meshes_of
from scrimp.planner.baselines.roles import roles_of, width_of
from scrimp.planner.baselines.strategies import Baseline
from scrimp.planner.cost.zero_levels import precision_of
from scrimp.planner.formulation.on_mesh import Layers, OnMesh
from tests.support import capture_models
from tests.support.lowering.rehearse import rehearsed

# No two of these are the same size, so that a dim can be told by it.
SHAPE = {"dim": 48, "heads": 4, "layers": 3, "seq": 16, "vocab": 96, "tie": False}
EAGER = {**SHAPE, "dropout": 0.1, "attention": "eager"}
BATCH, MESH = 8, Mesh({"dp": 2, "tp": 2})


def built(name: str, **settings: object) -> nn.Module:
    with torch.device("meta"):
        return zoo.build(name, **settings)


@cache
def graph(eager: bool = False) -> Graph:
    shape, precision = EAGER if eager else SHAPE, precision_of("megatron-bf16", "adamw")
    assert precision is not None
    return captured(built("gpt-tiny", **shape), zoo.example_batch("gpt-tiny", BATCH, **shape), precision)


@cache
def drawn(precision: str = "megatron-bf16", eager: bool = False) -> Drawn:
    numbers = precision_of(precision, "adamw")
    assert numbers is not None
    return Drawn(graph(eager), Cluster.preset("4xA100-80"), numbers, "adamw")


def kinds(name: str, mesh: Mesh = MESH) -> dict[str, int]:
    return {kind.kind: kind.nbytes for kind in drawn().plan(BASELINES[name](mesh), mesh).memory.kinds}


def parameters() -> tuple[int, int]:
    """Those of products and of tokens, which a tensor-parallel axis shares, and the others."""
    shared = whole = 0
    for name, weight in built("gpt-tiny", **SHAPE).named_parameters():
        split = (weight.dim() > 1 and name != "positions.weight") or name.endswith(("qkv.bias", "up.bias"))
        shared, whole = (shared + weight.numel(), whole) if split else (shared, whole + weight.numel())
    return shared, whole


@pytest.mark.parametrize("mesh", ["dp=4", "x=2,y=2"])
def test_data_parallelism_and_its_stages(mesh: str) -> None:
    total = sum(parameters())
    for name, (weight, gradient, state) in {
        "ddp": (1, 1, 1), "zero-1": (1, 1, 4), "zero-2": (1, 4, 4), "zero-3": (4, 4, 4),
    }.items():  # fmt: skip
        found = kinds(name, Mesh.parse(mesh))
        for kind, nbytes, over in (("parameters", 2, weight), ("gradients", 4, gradient), ("optimizer", 12, state)):
            assert found[kind] == pytest.approx(total * nbytes / over, rel=0.001)


@pytest.mark.parametrize("name", ["tp", "tp-sp", "tp-sp-dist-opt"])
def test_tensor_parallelism(name: str) -> None:
    found = kinds(name)
    split, whole = parameters()
    assert found["parameters"] == 2 * (split // 2 + whole)
    assert found["gradients"] == 4 * (split // 2 + whole)
    assert found["optimizer"] == 12 * (split // 2 + whole) // (2 if name == "tp-sp-dist-opt" else 1)


def test_the_sequence_splits_what_the_stream_saves() -> None:
    """Per layer of s*b*h elements in bf16, without dropout: 8 + 24/t bytes, or 32/t; statistics of norms and attention beside."""
    layers, tokens = SHAPE["layers"], BATCH // 2 * SHAPE["seq"]
    for name, each in (("tp", 8 + 24 / 2), ("tp-sp", 32 / 2)):
        found = kinds(name)
        formula = layers * tokens * SHAPE["dim"] * each
        statistics = layers * tokens * (2 * 2 * 2 + 4 * SHAPE["heads"])
        ends = 4 * tokens * (SHAPE["dim"] * 2 + SHAPE["vocab"]) * 2  # embedding, last norm, logits
        assert formula <= found["activations"] <= formula + statistics + ends


def test_the_least_memory_is_never_above_a_baseline() -> None:
    numbers = precision_of("megatron-bf16", "adamw")
    assert numbers is not None
    assembly = OnMesh(Layers(graph()), Cluster.preset("4xA100-80"), MESH).assembly(numbers, (KEEP,))
    problem = assembly.sketch.problem()
    least = solve(problem, seconds=60)
    for name in ("ddp", "zero-3", "tp", "tp-sp", "tp-sp-dist-opt"):
        one = BASELINES[name](MESH)
        found = solve(one.restrict(assembly, problem), objective="time", seconds=60, gap=1e-4)
        assert least.peak_nbytes <= found.peak_nbytes
        # Drawn up with its own options alone it is the same.
        alone = drawn().plan(one, MESH)
        assert (alone.memory.peak_nbytes, alone.seconds) == (found.peak_nbytes, pytest.approx(found.seconds, rel=1e-3))


@pytest.mark.parametrize("name", ["ddp-full", "tp", "tp-selective", "tp-full", "tp-sp", "tp-sp-selective", "tp-sp-full"])
def test_a_rehearsal_holds_the_same_bytes(name: str) -> None:
    found = drawn("bf16", eager=True).plan(BASELINES[name](MESH), MESH)
    assert 0.98 * found.memory.peak_nbytes <= rehearsed(found, found.source.graph) <= 1.01 * found.memory.peak_nbytes


def test_recompute_is_of_scores_or_of_all_but_inputs() -> None:
    def again(name: str) -> set[str]:
        found = drawn("bf16", eager=True).plan(BASELINES[name](MESH), MESH)
        ends = [layers for layers in found.layers if not layers.path.startswith("blocks")]
        assert {op.saved for layers in ends for op in layers.ops} == {KEEP}
        forward = {op.name for each in graph(eager=True).graphs for op in each.ops if not op.backward}
        blocks = [layers for layers in found.layers if layers.path.startswith("blocks")]
        return {op.target for layers in blocks for op in layers.ops if op.saved == "recompute" and op.name in forward}

    assert again("tp") == set()
    core = {"bmm", "add", "_softmax", "native_dropout", "arange", "gt", "zeros", "masked_fill", "unsqueeze", "view"}
    assert {target.split(".")[1] for target in again("tp-selective")} == core
    assert {"aten.addmm.default", "aten.native_layer_norm.default", "aten.gelu.default"} <= again("tp-full")


def test_roles_are_told_by_who_reads_whom() -> None:
    """No name of a module is looked at: two writings of the same model have the same weights split."""
    found = drawn(eager=True).plan(BASELINES["tp"](MESH), MESH)
    where = {weight.name: weight.layout for layers in found.layers for weight in layers.weights}
    assert where["embed.weight"] == "[tp,-]"
    assert where["positions.weight"] == "[-,-]"
    assert where["blocks.0.attention.qkv.weight"] == "[(-)(tp),-]"
    assert where["blocks.0.attention.out.weight"] == where["blocks.0.mlp.down.weight"] == "[-,tp]"
    assert where["blocks.0.mlp.up.weight"] == where["head.weight"] == "[tp,-]"
    assembly, width = found.source.assembly, width_of(found.source.graph)
    assert width == SHAPE["dim"]
    (block, *_) = [part.model for part in assembly.parts if found.source.graph.layers[part.first].path == "blocks.0"]
    roles = [role for role in roles_of(block, width) if role != "inside"]
    assert roles == ["stream", "column", "heads", "row", "stream", "stream", "column", "row", "stream", "stream", "stream"]


@pytest.mark.parametrize("family", ["llama", *(pytest.param(one, marks=pytest.mark.full) for one in ("gpt2", "bert"))])
def test_hugging_face(family: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")
    model, batch = capture_models.build(family, 2), capture_models.batch(family)
    total = sum(weight.numel() for weight in model.parameters())
    made = {
        name: baseline_plan(model, batch, "2xA100-80", name, mesh=mesh, precision="megatron-bf16")
        for name, mesh in (("zero-3", "dp=2"), ("tp-sp", "tp=2"))
    }
    states = {
        name: sum(kind.nbytes for kind in found.memory.kinds if kind.kind in ("parameters", "gradients", "optimizer"))
        for name, found in made.items()
    }
    assert states["zero-3"] == pytest.approx(18 * total / 2, rel=0.01)
    where = {weight.name: weight.layout for layers in made["tp-sp"].layers for weight in layers.weights}
    for name, layout in where.items():
        whole = (
            len(dict(model.named_parameters())[name].shape) == 1 or "position" in name or "token_type" in name or "wpe" in name
        )
        assert ("tp" in layout) != whole or "bias" in name, name


def test_a_baseline_is_a_plan() -> None:
    found = baseline_plan(
        built("gpt-tiny", **SHAPE), zoo.example_batch("gpt-tiny", BATCH, **SHAPE), "4xA100-80", "tp-sp", mesh="dp=2,tp=2"
    )
    assert Plan.from_json(found.to_json()) == found
    assert "mesh      dp=2,tp=2" in found.summary()


def test_plans_stand_beside_baselines() -> None:
    model, batch = built("gpt-tiny", **SHAPE), zoo.example_batch("gpt-tiny", BATCH, **SHAPE)
    found = plan(model, batch, "4xA100-80", mesh="x=4", activations=(KEEP,), precision="megatron-bf16")
    others = compare(found, ("zero-3", "tp-sp", "tp-sp-selective", "tp-sp-dist-opt"))
    assert [(other.name, str(other.mesh)) for other in others[:3]] == [
        ("zero-3", "dp=4"),
        ("tp-sp", "dp=2,tp=2"),
        ("tp-sp", "tp=4"),
    ]
    for other in others:
        assert (other.plan is None) == bool(other.why)
        assert other.plan is None or found.memory.peak_nbytes <= other.plan.memory.peak_nbytes
    assert {other.name for other in others if other.plan is None} == {"tp-sp-selective", "tp-sp-dist-opt"}
    with pytest.raises(PlanError, match="does not hold the model"):
        compare(Plan.from_json(found.to_json()))


def test_meshes_stay_in_a_node() -> None:
    cluster = Cluster.preset("32xA100-80")
    assert [str(mesh) for mesh in meshes_of("zero-3", cluster)] == ["dp=32"]
    assert [str(mesh) for mesh in meshes_of("tp-full", cluster)] == ["dp=16,tp=2", "dp=8,tp=4", "dp=4,tp=8"]


@pytest.mark.parametrize(
    ("model", "settings", "baseline", "mesh", "words"),
    [
        ("gpt-tiny", SHAPE, "tp", "tp=8", "4 heads cannot be split over the 8 devices of 'tp'"),
        ("llama-tiny", {"seq": 16}, "tp", "tp=4", "2 heads of keys and values cannot be split over the 4 devices of 'tp'"),
        ("gpt-tiny", {**SHAPE, "vocab": 97}, "tp", "tp=2", "its weight of 97x48 cannot be split by its"),
        ("gpt-tiny", SHAPE, "ddp", "dp=16", "a batch of 8 cannot be split over 16 devices"),
        ("gpt-tiny", SHAPE, "tp-selective", "tp=2", "its attention is one fused operator"),
        ("gpt-tiny", SHAPE, "tp-sp-dist-opt", "tp=2", "no data-parallel axis"),
        ("gpt-tiny", SHAPE, "tp-4d", "tp=2", "there is no baseline 'tp-4d'; there are ddp, zero-1"),
        ("gpt-tiny", SHAPE, "zero-2", "dp=2", "use 'megatron-bf16'"),
        ("resnet-tiny", {}, "tp", "tp=2", "this model has no attention"),
        ("resnet-tiny", {}, "ddp-full", "dp=2", "repeated layers, and this model has none"),
        ("vit-tiny", {}, "tp-sp", "tp=2", "no tensor of the batch holds tokens"),
        ("moe-tiny", {}, "tp", "tp=2", "is undefined for a weight of 4x32x64"),
    ],
)
def test_what_cannot_be_made_is_said(model: str, settings: dict[str, object], baseline: str, mesh: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        baseline_plan(built(model, **settings), zoo.example_batch(model, BATCH, **settings), "16xA100-80", baseline, mesh=mesh)
    assert words in str(caught.value)


def test_an_axis_that_is_neither_does_nothing() -> None:
    found = drawn().plan(Baseline(dp=("dp",)), MESH)
    assert all(
        "tp" not in layout for layers in found.layers for op in layers.ops for layout in (*op.inputs, *op.outputs) if layout
    )
