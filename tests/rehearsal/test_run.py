"""What a rehearsal gives, in one process: its parts add up, it takes no memory on meta, and it says what is wrong."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from scrimp import AdamW, FitError, Plan, RunError, ScrimpError, plan, rehearse, zoo
from scrimp.cluster import Cluster
from scrimp.rehearsal import Rehearsal, rehearse_all
from tests.run import models
from tests.run.plans import plan_of

GPT = zoo.example_batch("gpt-tiny", models.ROWS)


@cache
def gpt_plan() -> Plan:
    return plan_of("gpt-tiny", "x=2,y=2", "least")


@pytest.fixture
def model() -> nn.Module:
    return models.build("gpt-tiny")


def test_the_parts_add_up(model: nn.Module) -> None:
    found = rehearse(gpt_plan(), model, GPT, rank=2)
    peak = found.peak
    assert len(found.points) == len(found.totals) == len({*map(len, found.kinds.values())}) * len(found.points)
    assert peak.nbytes == max(found.totals) == found.totals[peak.point] == sum(peak.kinds.values())
    assert peak.where == found.points[peak.point]
    for kind in ("activations", "temporaries"):
        assert sum(each.nbytes for each in peak.alive if each.kind == kind) == peak.kinds[kind]
    assert found.compute_seconds is None
    assert found.communication_seconds > 0
    assert found.points[-1] == "update"
    assert found.totals[-1] == sum(found.kinds[kind][-1] for kind in ("parameters", "gradients", "optimizer"))
    assert {"alive", "peak", "compute", "step"} <= {line.split()[0] for line in found.summary().splitlines()}


def test_the_model_does_not_change_and_meta_serves_as_well(model: nn.Module) -> None:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = rehearse(gpt_plan(), model, GPT)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.device("meta"):
        again = zoo.build("gpt-tiny")
    assert rehearse(gpt_plan(), again, [each.to("meta") for each in GPT]) == found


def test_a_rehearsal_survives_json(model: nn.Module) -> None:
    found = rehearse(gpt_plan(), model, GPT)
    assert Rehearsal.from_json(found.to_json()) == found
    with pytest.raises(ScrimpError, match="not JSON"):
        Rehearsal.from_json(found.to_json()[:-9])
    with pytest.raises(ScrimpError):
        Rehearsal.from_json("{}")
    with pytest.raises(ScrimpError, match="not a rehearsal"):
        Rehearsal.from_json(found.to_json().replace('"alive"', '"dead"'))


@pytest.mark.parametrize("way", ["least", "offload", "zero-2"])
def test_for_real_on_the_cpu_it_takes_the_same_bytes(way: str, model: nn.Module) -> None:
    made = plan_of("gpt-tiny", "x=2,y=2", way)
    there, here = rehearse(made, model, GPT, 1), rehearse(made, model, GPT, 1, "cpu")
    assert here.points == there.points
    assert here.kinds == there.kinds
    assert here.compute_seconds is not None
    assert here.compute_seconds > 0


@pytest.mark.parametrize(("name", "mesh", "way"), [("bert-tiny", "x=2,y=2", "tp-sp"), ("resnet-tiny", "x=2,y=2,z=2", "least")])
def test_ranks_of_a_class_take_the_same_bytes(name: str, mesh: str, way: str) -> None:
    made, (args, kwargs) = plan_of(name, mesh, way), models.batch(name)
    found = rehearse_all(made, models.build(name), kwargs or args)
    assert sorted(rank for each in found for rank in each.ranks) == [*range(made.mesh.size)]
    for each in found:
        assert each.rank == each.ranks[0]
        for rank in each.ranks[1:]:
            other = rehearse(made, models.build(name), kwargs or args, rank)
            assert (other.points, other.kinds) == (each.points, each.kinds)


def test_more_than_memory_holds_on_meta() -> None:
    with torch.device("meta"):
        model = zoo.build("gpt-6b7", layers=2)
    batch = zoo.example_on_meta("gpt-6b7", 8, layers=2)
    made = plan(model, batch, "8xA100-80", mesh="x=8", time_limit=2, gap=0.1)
    found = rehearse(made, model, batch, rank=7)
    assert found.peak.nbytes > 1 << 30
    assert "scratch" in found.kinds


def test_bad_input_is_named(model: nn.Module) -> None:
    made = gpt_plan()
    for rank in (4, -1, True, "0"):
        with pytest.raises(RunError, match="the plan is for 4 ranks, 0 to 3"):
            rehearse(made, model, GPT, rank)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="meta, cpu, cuda"):
        rehearse(made, model, GPT, on="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match="no GPU here"):
            rehearse(made, model, GPT, on="cuda")
    saved = Plan.from_json(made.to_json())
    with pytest.raises(RunError, match="plan this model"):
        rehearse(saved, models.build("llama-tiny"), GPT)
    with pytest.raises(RunError, match="has the shape"):
        rehearse(made, model, zoo.example_batch("gpt-tiny", 4))
    with pytest.raises(RunError, match="batch has"):
        rehearse(made, model, GPT[:1])
    with pytest.raises(RunError, match=r"other states|optimizer="):
        rehearse(plan_of("gpt-tiny", "x=2", "least", "sgd"), model, GPT, optimizer=AdamW())


def test_what_does_not_fit_on_the_cpu_is_refused_before_it_runs(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrimp.rehearsal.run.available_host_nbytes", lambda: 1000)
    with pytest.raises(FitError, match="on='meta'"):
        rehearse(gpt_plan(), model, GPT, on="cpu")


def test_a_faster_network_predicts_less_communication(model: nn.Module) -> None:
    found = rehearse(gpt_plan(), model, GPT)
    assert Cluster.from_json(gpt_plan().cluster).hardware is not None
    other = plan(model, GPT, "4xH100", mesh="x=2,y=2", precision="fp32", time_limit=2, gap=0.05)
    assert rehearse(other, model, GPT).communication_seconds < found.communication_seconds
