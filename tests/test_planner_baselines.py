"""Known parallelisms as plans: their bytes by hand, and the least-memory plan is never above one of them."""

from __future__ import annotations

import pytest
import torch

from scrimp import Cluster, Mesh, zoo
from scrimp.planner import solve
from scrimp.planner._assemble import Assembly
from scrimp.planner._baselines import Baseline
from scrimp.planner._states import precision_of
from scrimp.planner.api import assembled, captured

# No two of these are the same size, so that a dim can be told by it.
SHAPE = {"dim": 48, "heads": 4, "layers": 3, "seq": 16, "vocab": 96, "tie": False}
BATCH, MESH = 8, Mesh({"dp": 2, "tp": 2})


@pytest.fixture(scope="module")
def assembly() -> Assembly:
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", **SHAPE)
    precision = precision_of("megatron-bf16", "adamw")
    assert precision is not None
    graph = captured(model, zoo.example_batch("gpt-tiny", BATCH, **SHAPE), precision)
    return assembled(graph, Cluster.preset("4xA100-80"), MESH, precision)[0]


def kinds(assembly: Assembly, **how: object) -> dict[str, int]:
    problem = assembly.sketch.problem()
    one = Baseline(dp=("dp",), **how)  # type: ignore[arg-type]
    return dict(solve(one.restrict(assembly, problem), objective="time", seconds=60).kinds)


def parameters() -> tuple[int, int]:
    """Those of products, which a tensor-parallel axis shares, and the others."""
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", **SHAPE)
    shared = whole = 0
    for name, weight in model.named_parameters():
        split = weight.dim() > 1 or name.endswith(("qkv.bias", "up.bias"))
        shared, whole = (shared + weight.numel(), whole) if split else (shared, whole + weight.numel())
    return shared, whole


def test_data_parallelism_and_its_stages(assembly: Assembly) -> None:
    """Over the data axis alone; the other one does nothing."""
    total = sum(parameters())
    for shared, (weight, gradient, state) in {0: (1, 1, 1), 1: (1, 1, 2), 2: (1, 2, 2), 3: (2, 2, 2)}.items():
        found = kinds(assembly, shared=shared)
        # What the solver does with the other axis, it does with the weights of products alone.
        for kind, nbytes, over in (("parameters", 2, weight), ("gradients", 4, gradient), ("optimizer", 12, state)):
            assert total * nbytes / over / 2 <= found[kind] <= total * nbytes / over * 1.01


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("shared", [0, 1])
def test_tensor_parallelism(assembly: Assembly, sequence: bool, shared: int) -> None:
    found = kinds(assembly, tp="tp", sequence=sequence, shared=shared)
    split, whole = parameters()
    assert found["parameters"] == 2 * (split // 2 + whole)
    assert found["gradients"] == 4 * (split // 2 + whole)
    assert found["optimizer"] == 12 * (split // 2 + whole) // (2 if shared else 1)


def test_the_sequence_splits_what_the_stream_saves(assembly: Assembly) -> None:
    """Per layer of s*b*h elements in bf16, without dropout: 8 + 24/t bytes, or 32/t; statistics of norms and attention beside."""
    layers, tokens = SHAPE["layers"], BATCH // 2 * SHAPE["seq"]
    for sequence, each in ((False, 8 + 24 / 2), (True, 32 / 2)):
        found = kinds(assembly, tp="tp", sequence=sequence)
        formula = layers * tokens * SHAPE["dim"] * each
        statistics = layers * tokens * (2 * 2 * 2 + 4 * SHAPE["heads"])
        ends = 4 * tokens * (SHAPE["dim"] * 2 + SHAPE["vocab"]) * 2  # embedding, last norm, logits
        assert formula <= found["activations"] <= formula + statistics + ends


def test_the_least_memory_is_never_above_a_baseline(assembly: Assembly) -> None:
    problem = assembly.sketch.problem()
    least = solve(problem, seconds=60)
    for tp, sequence, shared in ((None, False, 3), ("tp", False, 0), ("tp", True, 0), ("tp", True, 1)):
        one = Baseline(dp=("dp",), tp=tp, sequence=sequence, shared=shared)
        found = solve(one.restrict(assembly, problem), objective="time", seconds=60)
        assert least.peak_nbytes <= found.peak_nbytes
