"""A search that is out of time: it begins from known parallelisms, and ends where it was told to."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from scrimp import Cluster, Mesh, Plan, plan, zoo
from scrimp.planner.api import captured, plan_graph
from scrimp.planner.baselines.compare import compare
from scrimp.planner.cost.zero_levels import precision_of
from scrimp.planner.deadline import Deadline
from scrimp.planner.formulation.on_mesh import Layers
from scrimp.planner.mesh import search
from scrimp.planner.mesh.search import Request, best_known_on, best_on
from scrimp.planner.solver.session import Session

CLUSTER, MESH = Cluster.preset("4xA100-80"), Mesh({"x": 2, "y": 2})
SHAPE = {"dim": 32, "heads": 4, "layers": 2, "seq": 16, "vocab": 64}
PRECISION = precision_of("bf16", "adamw")
assert PRECISION is not None


@lru_cache
def layers() -> Layers:
    assert PRECISION is not None
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", **SHAPE)
    return Layers(captured(model, zoo.example_batch("gpt-tiny", 8, **SHAPE), PRECISION))


def request(objective: str = "memory", seconds: float = 60.0, limit: int | None = None) -> Request:
    assert PRECISION is not None
    return Request(
        precision=PRECISION, ways=("keep", "recompute", "offload"), objective=objective, limit_nbytes=limit, gap=0.01,
        deadline=Deadline.after(seconds), say=lambda words: None,
    )  # fmt: skip


def planned(**settings: Any) -> Plan:
    assert PRECISION is not None
    given = {"mesh": None, "memory": None, "objective": "memory", "activations": ("keep", "recompute", "offload"), "gap": 0.01}
    return plan_graph(layers().graph, CLUSTER, PRECISION, "adamw", **{**given, **settings})


def test_a_deadline_is_divided_and_passes() -> None:
    deadline = Deadline.after(1000)
    assert 0 < deadline.part(0.5).left() <= 500 < deadline.left() <= 1000
    assert not deadline.passed
    late = Deadline.after(-1)
    assert (late.left(), late.passed, late.part(0.5).passed) == (0.0, True, True)


def test_without_time_no_plan_is_above_a_known_parallelism() -> None:
    """With attention that no other layer has (a T5's first), and layers of two kinds."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    found = plan(model, {"input_ids": tokens, "labels": tokens.clone()}, CLUSTER, time_limit=0)
    names = ("zero-3", "zero-3-full", "tp-sp", "tp-sp-full", "tp-sp-dist-opt-full")  # those with the lowest peaks of all
    others = [other.plan.memory.peak_nbytes for other in compare(found, names) if other.plan is not None]
    assert len(others) == 7  # tensor parallelism on two meshes, one of which has no axis for a distributed optimizer
    assert found.memory.peak_nbytes <= min(others)
    assert found.late == ("x=4", "x=2,y=2")
    assert found.bound_nbytes <= found.memory.peak_nbytes
    assert found.gap == pytest.approx(1 - found.bound_nbytes / found.memory.peak_nbytes, abs=1e-6)


@pytest.mark.parametrize("objective", ["memory", "time", "redundancy"])
def test_an_interrupted_search_is_no_worse_than_what_it_began_with(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = best_known_on(layers(), CLUSTER, MESH, request(objective))
    assert known is not None
    monkeypatch.setattr(search, "_least", lambda known, request: None)  # so that it searches all the same, for no time
    found = best_on(layers(), CLUSTER, MESH, request(objective, seconds=0))
    assert found.searched
    assert search.order(found.solution, objective) <= search.order(known.solution, objective)


def test_without_time_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_solved", lambda *given: pytest.fail("a search began"))
    found = planned(time_limit=0)
    assert found.late == ("x=4", "x=2,y=2")
    assert "time      was up before a search on 2 meshes (x=4; x=2,y=2): only baselines" in found.summary()
    assert Plan.from_json(found.to_json()).late == found.late


def test_no_part_of_a_search_is_given_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Baselines are solved before (`solve`, for 60 s at most); all else comes from what is left."""
    given: list[float] = []
    original = Session.minimise

    def minimise(self: Session, objective: str, **limits: Any) -> Any:
        given.append(limits["seconds"])
        return original(self, objective, **limits)

    monkeypatch.setattr(search.Known, "every", lambda self: iter(()))
    monkeypatch.setattr(Session, "minimise", minimise)
    found = planned(time_limit=3.0)
    assert len(given) >= 3
    assert max(given) <= 3.0
    assert found.objective == "memory"


def test_a_limit_that_no_known_parallelism_keeps_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    known, free = best_known_on(layers(), CLUSTER, MESH, request()), best_on(layers(), CLUSTER, MESH, request())
    assert known is not None
    assert free.solution.peak_nbytes < known.solution.peak_nbytes
    within = best_on(layers(), CLUSTER, MESH, request(seconds=0, limit=known.solution.peak_nbytes))
    assert not within.searched
    with_limit = request("time", seconds=0, limit=(free.solution.peak_nbytes + known.solution.peak_nbytes) // 2)
    assert best_known_on(layers(), CLUSTER, MESH, with_limit) is None
    monkeypatch.setattr(search, "_solved", lambda *given, **more: pytest.fail("it searched"))
    with pytest.raises(pytest.fail.Exception, match="it searched"):
        best_on(layers(), CLUSTER, MESH, with_limit)


def test_redundancy_picks_the_mesh_by_the_bytes_held_and_its_gap_is_of_these() -> None:
    each = {mesh: planned(objective="redundancy", time_limit=60, mesh=mesh, gap=0.0) for mesh in ("x=4", "x=2,y=2")}
    found = planned(objective="redundancy", time_limit=60, gap=0.0)
    assert found.held_nbytes == min(one.held_nbytes for one in each.values())
    assert found.held_nbytes == each[str(found.mesh)].held_nbytes
    phase = found.source.solution.phases[0]
    assert (phase.objective, phase.value) == ("held", found.held_nbytes)
    assert found.gap == pytest.approx((phase.value - phase.bound) / phase.value)
    assert "proven of the bytes held;" in found.summary()
