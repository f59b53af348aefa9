"""Plans with stages and micro-batches: counted again by other code, cut as well as can be, and refused with reasons."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from math import inf, prod
from pathlib import Path

import pytest
import torch

from scrimp import Cluster, FitError, Plan, PlanError, plan, zoo
from scrimp.capture import Graph
from scrimp.planner import evaluate
from scrimp.planner.api import captured
from scrimp.planner.cost.zero_levels import accumulating, precision_of
from scrimp.planner.deadline import Deadline
from scrimp.planner.formulation.on_mesh import Layers, OnMesh
from scrimp.planner.micro_batches import micro_batch, rows_of
from scrimp.planner.pipeline.plan import schedules
from scrimp.planner.pipeline.planner import Planner
from scrimp.planner.pipeline.stage import Setup, Stage
from scrimp.planner.pipeline.stage_devices import stage_cluster
from scrimp.planner.shard.stage_subgraph import piece
from scrimp.planner.solver.model import PEAK
from tests.support.planner.stage_recount import recounted

NAME, BATCH = "gpt-tiny", 32


def built(layers: int = 6, **settings: object) -> torch.nn.Module:
    with torch.device("meta"):
        return zoo.build(NAME, layers=layers, **settings)


@cache
def planned(stages: int, micro_batches: int, interleave: int = 1, mesh: str = "x=2", layers: int = 6, **others: object) -> Plan:
    batch = zoo.example_batch(NAME, BATCH)
    size = prod(int(each.partition("=")[2]) for each in mesh.split(","))
    return plan(
        built(layers), batch, f"{stages * size}xA100-80", mesh=mesh, stages=stages, micro_batches=micro_batches,
        interleave=interleave, activations=("keep",), time_limit=30, **others,
    )  # type: ignore[arg-type]  # fmt: skip


def graph_of(found: Plan, layers: int = 6) -> Graph:
    assert found.schedule is not None
    numbers = precision_of(found.precision, found.optimizer)
    assert numbers is not None
    batch = micro_batch(zoo.example_batch(NAME, BATCH), found.schedule.micro_batches)
    return captured(built(layers), batch, numbers)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "interleave", "mesh"),
    [
        (2, 4, 1, "x=2"),
        (4, 8, 1, "x=2"),
        (2, 4, 2, "x=2"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((4, 2, 1, "x=2"), (2, 4, 1, "x=2,y=2"), (1, 4, 1, "x=4"))),
    ],
)
def test_other_code_counts_the_same_bytes(stages: int, micro_batches: int, interleave: int, mesh: str) -> None:
    """But for the batch, and for weights that are gathered while they are used."""
    found = planned(stages, micro_batches, interleave, mesh)
    assert found.schedule is not None
    graph = graph_of(found)
    for k, stage in enumerate(found.schedule.stages):
        again = recounted(found, graph, k)
        batch = sum(kind.nbytes for kind in stage.memory.kinds if kind.kind == "buffers")
        inside = [layers for layers in found.layers if any(a <= layers.first < b for a, b in stage.pieces)]
        gathered = sum(
            2 * prod(next(each.shape for each in graph.parameters if each.name == weight.name))
            for layers in inside
            for weight in layers.weights
            if weight.weight_axes
        )
        assert again <= stage.memory.peak_nbytes - batch <= again + gathered
        assert sum(kind.nbytes for kind in stage.memory.kinds) == stage.memory.peak_nbytes
    assert found.memory.peak_nbytes == max(stage.memory.peak_nbytes for stage in found.schedule.stages)


def planner(
    stages: int, micro_batches: int, interleave: int = 1, layers: int = 4, settings: dict[str, object] | None = None
) -> Planner:
    numbers = precision_of("bf16", "adamw")
    assert numbers is not None
    part, links = stage_cluster(Cluster.preset(f"{2 * stages}xA100-80"), stages)
    batch = micro_batch(zoo.example_batch(NAME, BATCH, **settings or {}), micro_batches)
    graph = captured(built(layers, **settings or {}), batch, numbers)
    (mesh,) = part.meshes(max_axes=1)
    assembly = OnMesh(Layers(graph), part, mesh).assembly(accumulating(numbers), ("keep",))
    models = {graph.layers[each.first].graph: each.model for each in assembly.parts}
    setup = Setup(
        graph=graph, models=tuple(models[k] for k in range(len(models))), moves=assembly.moves, precision=assembly.precision,
        rates=assembly.rates, ways=("keep",), links=links, micro_batches=micro_batches, interleave=interleave,
    )  # fmt: skip
    return Planner(setup, "memory", 1 << 40, deadline=Deadline.after(60), gap=0.0, say=lambda words: None)


def test_no_other_cut_has_a_smaller_peak() -> None:
    for stages, micro_batches in ((2, 4), (3, 4)):
        one = planner(stages, micro_batches, layers=3)
        count = len(one.setup.graph.layers)
        found = one.run()
        peaks = {cut: max(
            Stage(one.setup, s, [piece(one.setup.graph, cut[s], cut[s + 1])]).least(PEAK, inf, 20, 0.0)[0] for s in range(stages)
        ) for cut in ((0, *inner, count) for inner in combinations(range(1, count), stages - 1))}  # fmt: skip
        assert max(solution.peak_nbytes for solution in found.solutions) == min(peaks.values()) == peaks[found.cut]


def test_a_weight_of_two_pieces_of_one_stage_counts_once() -> None:
    """The embedding and the head of a GPT are tied: here one stage has both, in pieces that are not adjacent."""
    one = planner(2, 4, 2, layers=4)
    graph = one.setup.graph
    mine = [piece(graph, 0, 2), piece(graph, 4, 6)]
    stage = Stage(one.setup, 0, mine)
    names = {name for each in mine for layer in each.graph.layers for _, name in layer.parameters}
    elements = sum(prod(each.shape) for each in graph.parameters if each.name in names and not each.buffer)
    whole = [nbytes for first, _, kind, nbytes in stage.joined.sketch.once if first == 0 and kind == "parameters"]
    assert sum(whole) == 2 * elements
    alone = [Stage(planner(2, 4, 1, layers=4).setup, 0, [each]).joined.sketch.once for each in mine]
    apart = sum(nbytes for once in alone for first, _, kind, nbytes in once if first == 0 and kind == "parameters")
    tied = next(each for each in graph.parameters if each.name in mine[0].shared)
    assert apart == 2 * (elements + prod(tied.shape))
    assert evaluate(stage.problem, tuple(0 for _ in stage.problem.nodes)).peak_nbytes > 0


@pytest.mark.parametrize(("stages", "interleave"), [(2, 1), (4, 1), (2, 2), (2, 4)])
def test_the_first_stage_keeps_what_megatron_says(stages: int, interleave: int) -> None:
    """Of equal stages it has as many layers' activations as the whole model of one micro-batch, times 1 + (p - 1) / (p v) where
    pieces are interleaved. A layer of s * b * h elements keeps 32 bytes of each, split over the devices, and statistics."""
    shape: dict[str, object] = {"dim": 64, "heads": 2, "seq": 32, "vocab": 64, "tie": False}
    layers, micro_batches = 8, 2 * stages
    one = planner(stages, micro_batches, interleave, layers, shape)
    each = layers // (stages * interleave)
    # The embedding is apart: pieces are of blocks alone.
    inside = [1 + k * each for k in range(stages * interleave + 1)]
    mine = [piece(one.setup.graph, inside[k], inside[k + 1]) for k in range(0, stages * interleave, stages)]
    stage = Stage(one.setup, 0, mine)
    found = stage.session.minimise(PEAK, seconds=20, gap=0.0)
    assert found.choice is not None
    flights = [sum(scene.flights) for scene in one.setup.scenes[0]]
    assert max(flights) * each == pytest.approx(layers * (1 if interleave == 1 else 1 + (stages - 1) / (stages * interleave)))
    tokens = BATCH // micro_batches * 32
    formula = max(flights) * each * tokens * 64 * 32 / 2
    statistics = max(flights) * each * tokens * (2 * 2 * 2 + 4 * 2)  # of norms on all devices, and of attention
    kept = evaluate(stage.problem, found.choice).kinds["activations"]
    assert 0.97 * formula <= kept <= 1.03 * (formula + statistics)


def test_more_micro_batches_take_less_and_wait_less() -> None:
    few, many = planned(4, 4), planned(4, 8)
    assert few.schedule is not None
    assert many.schedule is not None
    assert many.memory.peak_nbytes < few.memory.peak_nbytes
    assert [stage.in_flight for stage in many.schedule.stages] == [4, 3, 2, 1]
    assert [stop for stage in many.schedule.stages for _, stop in stage.pieces][-1] == 8
    assert sum(layers.count for layers in many.layers) == 8


def test_time_comes_first_if_it_is_asked_to() -> None:
    least, fast = planned(2, 4), planned(2, 4, objective="time")
    assert fast.seconds < least.seconds
    assert fast.memory.peak_nbytes > least.memory.peak_nbytes
    middle = planned(2, 4, objective="time", memory=2 * least.memory.peak_nbytes)
    assert middle.memory.peak_nbytes <= 2 * least.memory.peak_nbytes
    assert fast.seconds <= middle.seconds <= least.seconds


def test_the_plan_says_its_schedule(tmp_path: Path) -> None:
    found = planned(2, 4, 2)
    assert found.schedule is not None
    assert found.schedule.interleave == 2
    text = found.summary()
    assert "2 stages, 4 micro-batches, 1F1B, interleaved: 2 pieces a stage; devices wait" in text
    assert "5 in flight" in text
    found.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == found
    assert again.summary() == text


def test_a_few_schedules_are_tried() -> None:
    assert schedules("auto", "auto", 1, 4, 8) == [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8)]
    assert schedules("auto", 8, 2, 12, 16) == [(2, 8), (4, 8)]
    assert schedules(3, "auto", 2, 12, 12) == [(3, 3), (3, 6), (3, 12)]
    with pytest.raises(PlanError, match="nothing fits a batch of 1 rows"):
        schedules(2, "auto", 1, 4, 1)


@pytest.mark.full
def test_stages_are_chosen() -> None:
    told: list[str] = []
    found = plan(
        built(2), zoo.example_batch(NAME, 8), "4xA100-80", stages="auto", micro_batches="auto", activations=("keep",),
        time_limit=60, progress=told.append,
    )  # fmt: skip
    assert any("2 stages, 4 micro-batches" in words for words in told)
    assert any("1 stages, 2 micro-batches" in words for words in told)
    alone = plan(built(2), zoo.example_batch(NAME, 8), "4xA100-80", activations=("keep",), time_limit=20)
    assert found.memory.peak_nbytes <= alone.memory.peak_nbytes


def test_devices_of_a_stage_are_whole_nodes_first() -> None:
    shapes = ((32, 4, 1, 8, False), (32, 2, 2, 8, False), (8, 2, 1, 4, True), (24, 2, 3, 4, False))
    for devices, stages, nodes, each, near in shapes:
        whole = Cluster.preset(f"{devices}xA100-80")
        part, links = stage_cluster(whole, stages)
        assert whole.hardware is not None
        assert part.hardware is not None
        assert (part.hardware.nodes, part.hardware.devices_per_node) == (nodes, each)
        assert links[0] == (whole.hardware.inside_link if near else whole.hardware.between_link)


def test_rows_of_a_batch_are_parted() -> None:
    batch = {"ids": torch.zeros(8, 3), "table": torch.zeros(5), "more": [torch.zeros(8), "word"]}
    assert rows_of(batch) == 8
    part = micro_batch(batch, 4)
    assert isinstance(part, dict)
    assert part["ids"].shape == (2, 3)
    assert part["table"].shape == (5,)
    assert part["more"][0].shape == (2,)
    assert micro_batch(batch, 1) is batch


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stages": 3}, "stages=3: the cluster has 8 devices"),
        ({"stages": 16}, "take 1, 2, 4, 8"),
        ({"stages": 8}, "8 stages of a model of 4 layers"),
        ({"stages": 2, "interleave": 4, "micro_batches": 4}, "2 stages of 4 pieces each of a model of 4 layers"),
        ({"stages": 2, "micro_batches": 5}, "the batch has 32 rows, which 5 does not divide; use 4 or 8"),
        ({"stages": 4, "micro_batches": 2, "interleave": 2}, "no multiple of that; use 4"),
        ({"interleave": 2}, "more than one stage; give stages"),
        ({"stages": 0}, "stages=0"),
        ({"micro_batches": "many"}, "micro_batches='many'"),
    ],
)
def test_what_cannot_be_is_refused_with_reasons(settings: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan(built(2), zoo.example_batch(NAME, BATCH), "8xA100-80", activations=("keep",), **settings)  # type: ignore[arg-type]


def test_what_does_not_fit_is_said() -> None:
    for objective in ("memory", "time"):
        with pytest.raises(FitError, match=r"2 stages of 2 devices and 4 micro-batches: .*the budget is 10\.0 KiB"):
            planned(2, 4, objective=objective, memory="10KiB")
