"""Known parallelisms have the bytes of their published formulas: states and saved activations, at the turn of the step.

The formulas are those of "Reducing Activation Recomputation in Large Transformer Models" (a layer's bytes) and of ZeRO (states).
With s places, b sequences, h hidden units, a heads, v tokens, t tensor-parallel devices; what the ends of the model save is not
in the formula of a layer and is written out here: the mask of the embedding's dropout (1), what enters the last norm and what
enters the head (2 + 2), all s b h, and the loss' logarithms of 4 bytes for every token of the vocabulary.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from scrimp import Cluster, Mesh, Plan, zoo
from scrimp.capture import Graph
from scrimp.planner.api import captured
from scrimp.planner.baselines.compare import BASELINES, Drawn
from scrimp.planner.cost.zero_levels import precision_of

SETTINGS = {"vocab": 50304, "dropout": 0.1, "attention": "eager"}
BATCH = 4
PRECISION = precision_of("megatron-bf16", "adamw")
CLOSE = 0.002  # statistics of norms, places: a few bytes of every token
MODELS = [
    pytest.param("gpt-2b7"),
    pytest.param("gpt-6b7", marks=pytest.mark.full),
    pytest.param("gpt-13b", marks=pytest.mark.full),
]
MESHES = [
    pytest.param("dp=4,tp=2", marks=pytest.mark.full),
    pytest.param("dp=2,tp=4"),
    pytest.param("dp=1,tp=4", marks=pytest.mark.full),
    pytest.param("dp=2,tp=8", marks=pytest.mark.full),
]
# By sequence splitting and recompute: a layer's bytes for each s b h, of (t, 5 a s / h).
LAYER = {
    (False, ""): lambda t, core: 10 + 24 / t + core / t,
    (True, ""): lambda t, core: (34 + core) / t,
    (False, "-selective"): lambda t, core: 10 + 24 / t,
    (True, "-selective"): lambda t, core: 34 / t,
    (False, "-full"): lambda t, core: 2,
    (True, "-full"): lambda t, core: 2 / t,
}


@cache
def drawn(name: str, devices: int) -> Drawn:
    assert PRECISION is not None
    return Drawn(graph(name), Cluster.preset(f"{devices}xA100-80"), PRECISION, "adamw")


@cache
def graph(name: str) -> Graph:
    assert PRECISION is not None
    with torch.device("meta"):
        model = zoo.build(name, **SETTINGS)
    return captured(model, zoo.example_batch(name, BATCH, **SETTINGS), PRECISION)


def made(name: str, baseline: str, mesh: Mesh) -> Plan:
    return drawn(name, mesh.size).plan(BASELINES[baseline](mesh), mesh)


def held(plan: Plan, point: int) -> dict[str, int]:
    """Bytes by kind at a moment, added up from the problem and the choice."""
    problem, choice = plan.source.problem, plan.source.solution.choice
    found: dict[str, int] = {}
    for k, node in enumerate(problem.nodes):
        for hold in node.holds:
            if hold.first <= point <= hold.last:
                found[hold.kind] = found.get(hold.kind, 0) + hold.nbytes[choice[k]]
    for edge in problem.edges:
        one, other = (choice[node] for node in edge.nodes)
        for hold in edge.holds:
            if hold.first <= point <= hold.last:
                found[hold.kind] = found.get(hold.kind, 0) + hold.nbytes[one][other]
    return found


def turn(plan: Plan) -> int:
    """The first moment of the backward."""
    return int(plan.source.assembly.turn)


def states(found: dict[str, int]) -> int:
    return found["parameters"] + found["gradients"] + found["optimizer"]


def parameters(name: str) -> tuple[int, int]:
    """Those that tensor parallelism splits, and those that all its devices have: norms, biases of rows, places."""
    config = zoo.config(name, **SETTINGS)
    h, v, s, layers = config.dim, config.vocab, config.seq, config.layers  # type: ignore[union-attr]
    return layers * (12 * h * h + 7 * h) + v * h, layers * 6 * h + 2 * h + s * h


@pytest.mark.parametrize("recompute", ["", "-selective", "-full"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallelism(name: str, mesh: str, recompute: str) -> None:
    config, axes = zoo.config(name, **SETTINGS), dict(Mesh.parse(mesh).axes)
    s, h, a, v, layers = config.seq, config.dim, config.heads, config.vocab, config.layers  # type: ignore[union-attr]
    t, d = axes["tp"], axes["dp"]
    sbh, core = s * (BATCH // d) * h, 5 * a * s / h
    split, whole = parameters(name)
    for kind, sequence in (("tp", False), ("tp-sp", True), ("tp-sp-dist-opt", True)):
        plan = made(name, kind + recompute, Mesh.parse(mesh))
        found = held(plan, turn(plan))
        own = split / t + whole
        assert states(found) == pytest.approx(own * (6 + 12 / d if kind.endswith("opt") else 18), rel=CLOSE)
        ends = 5 * sbh / (t if sequence else 1) + 4 * sbh * v / h / t
        assert found["activations"] == pytest.approx(layers * sbh * LAYER[sequence, recompute](t, core) + ends, rel=CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_what_full_recompute_makes_again_is_one_layers(name: str) -> None:
    """Before the last block's backward: the inputs of all, everything else of this one, and the embedding's mask."""
    config = zoo.config(name, **SETTINGS)
    s, h, a, layers = config.seq, config.dim, config.heads, config.layers  # type: ignore[union-attr]
    plan = made(name, "tp-sp-full", Mesh.parse("dp=2,tp=4"))
    blocks = [part for part in plan.source.assembly.parts if plan.source.graph.layers[part.first].path.startswith("blocks")]
    found = held(plan, blocks[-1].again(blocks[-1].model.forward_ops - 1))
    each = s * (BATCH // 2) * h / 4
    assert found["activations"] == pytest.approx(each * (2 * layers + 32 + 5 * a * s / h + 1), rel=CLOSE)


@pytest.mark.parametrize("mesh", ["dp=4", pytest.param("x=2,y=2", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MODELS)
def test_data_parallelism(name: str, mesh: str) -> None:
    """Over all devices, be they one axis or two."""
    config = zoo.config(name, **SETTINGS)
    s, h, a, v, layers = config.seq, config.dim, config.heads, config.vocab, config.layers  # type: ignore[union-attr]
    total, devices = sum(parameters(name)), Mesh.parse(mesh).size
    sbh = s * (BATCH // devices) * h
    each = {"": 34 + 5 * a * s / h, "-full": 2}
    stages = {"ddp": 18, "zero-1": 6 + 12 / devices, "zero-2": 2 + 16 / devices, "zero-3": 18 / devices}
    for recompute, layer in each.items():
        for kind, nbytes in stages.items():
            plan = made(name, kind + recompute, Mesh.parse(mesh))
            found = held(plan, turn(plan))
            assert states(found) == pytest.approx(total * nbytes, rel=CLOSE)
            assert found["activations"] == pytest.approx(sbh * (layers * layer + 5 + 4 * v / h), rel=CLOSE)
