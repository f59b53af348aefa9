"""Plans whose budget keeps bytes free for what a device needs beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scrimp import Cluster, FitError, Memory, Mesh, Plan, PlanError, plan, zoo
from scrimp.cluster import Reserve
from scrimp.ledger import format_least, format_nbytes
from scrimp.planner import limit_of
from scrimp.planner.budget import budget_for, reserved

KIB = 1 << 10
CLUSTER = Cluster.preset("4xA100-80")
# Of the order of the small plans here.
SMALL = CLUSTER.with_reserve(
    Reserve(
        device="some",
        context_nbytes=64 * KIB,
        workspace_nbytes=32 * KIB,
        rounding_share=0.02,
        fragmentation_share=0.1,
        nccl_channels=1,
        nccl_connection_nbytes=4 * KIB,
        measured=("context", "workspace"),
    )
)


@cache
def planned(
    cluster: Cluster = SMALL, memory: int | str | None = None, reserve: int | str | None = None, objective: str = "memory",
    mesh: str | None = "x=4", stages: int = 1,
) -> Plan:  # fmt: skip
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", layers=2)
    return plan(
        model, zoo.example_batch("gpt-tiny", 16), cluster, mesh=mesh, memory=memory, reserve=reserve, objective=objective,
        activations={"keep"}, stages=stages, time_limit=5,
    )  # fmt: skip


@given(st.integers(1, 1 << 38), st.sampled_from(["auto", "2GiB", 0, None]), st.sampled_from(["x=1", "x=4", "x=2,y=2"]))
def test_a_budget_and_its_limit_belong_together(live: int, reserve: int | str | None, mesh: str) -> None:
    for cluster in (CLUSTER, SMALL):
        budget = budget_for(cluster, live, reserve, Mesh.parse(mesh))
        assert limit_of(cluster, budget, reserve, Mesh.parse(mesh)) >= live
        assert live == 1 or limit_of(cluster, budget - 1, reserve, Mesh.parse(mesh)) < live


def test_without_a_reserve_the_budget_is_for_live_storages() -> None:
    assert limit_of(CLUSTER, "2GiB") == 2 << 30
    assert limit_of(CLUSTER, Memory(device="2GiB")) == 2 << 30
    assert limit_of(CLUSTER, None) == 80 << 30
    assert reserved(CLUSTER, "2GiB", None) is None
    found = planned()
    assert found.reserve is None
    assert "reserve" not in json.loads(found.to_json())
    assert (
        "\nbeside    the plan, not in its budget: context 64.0 KiB (measured), workspace 32.0 KiB (measured), " in found.summary()
    )


def test_a_cpu_needs_nothing_beside() -> None:
    cluster = Cluster.preset("4xCPU")
    assert limit_of(cluster, "1GiB", "auto", Mesh.parse("x=4")) == 1 << 30
    found = planned(cluster, "1GiB", "auto")
    assert found.reserve is not None
    assert found.reserve.parts == found.beside == ()
    assert "beside" not in found.summary()
    assert Plan.from_json(found.to_json()) == found.bare()


@pytest.mark.parametrize("objective", ["memory", "time"])
def test_auto_keeps_the_clusters_parts_free(objective: str) -> None:
    least = planned().memory.peak_nbytes
    budget = budget_for(SMALL, least + 8 * KIB, "auto", Mesh.parse("x=4"))
    found = planned(memory=budget, reserve="auto", objective=objective)
    assert found.reserve is not None
    parts = {part.name: part.nbytes for part in found.reserve.parts}
    assert parts["context"] == 64 * KIB
    assert parts["NCCL"] == 2 * 2 * 4 * KIB  # two communicators, of two peers
    assert found.memory.peak_nbytes <= found.reserve.limit_nbytes <= budget - sum(parts.values())
    assert found.memory.peak_nbytes + sum(part.nbytes for part in SMALL.beside(found.memory.peak_nbytes, found.mesh)) <= budget
    assert "NCCL 16.0 KiB (estimated)" in found.summary()
    assert Plan.from_json(found.to_json()) == found.bare()
    assert Plan.from_json(found.to_json()).summary() == found.summary()


def test_a_size_is_kept_free_exactly() -> None:
    least = planned().memory.peak_nbytes
    found = planned(memory=least + 100 * KIB, reserve="100KiB", objective="time")
    assert found.reserve is not None
    assert found.reserve.limit_nbytes == least
    assert [row.other for row in planned().diff(found).figures if row.what == "reserved beside it"] == ["100.0 KiB"]
    assert [(part.nbytes, part.source) for part in found.beside] == [(100 * KIB, "given")]
    assert found.memory.peak_nbytes <= least
    with pytest.raises(FitError, match=r"the budget of .* without reserve 100\.0 KiB \(given\)\. Give memory='") as caught:
        planned(memory=least + 99 * KIB, reserve="100KiB")
    assert caught.value.least_nbytes == least + 100 * KIB


def test_each_mesh_has_its_own_communicators() -> None:
    one, two = (reserved(SMALL, "1MiB", "auto", Mesh.parse(mesh)) for mesh in ("x=4", "x=2,y=2"))
    assert one is not None
    assert two is not None
    assert two.limit_nbytes < one.limit_nbytes
    found = planned(memory="1MiB", reserve="auto", mesh=None)
    assert found.reserve == reserved(SMALL, "1MiB", "auto", found.mesh)


def test_stages_and_micro_batches_keep_it_free_too() -> None:
    found = planned(memory="2MiB", reserve="auto", mesh="x=2", stages=2)
    assert found.schedule is not None
    assert found.reserve == reserved(SMALL, "2MiB", "auto", found.mesh, 2)
    assert max(stage.memory.peak_nbytes for stage in found.schedule.stages) <= found.reserve.limit_nbytes  # type: ignore[union-attr]
    with pytest.raises(FitError, match=r"context 64\.0 KiB \(measured\).*or a smaller reserve="):
        planned(memory="300KiB", reserve="auto", mesh="x=2", stages=2)


def test_what_if_speaks_of_the_budget() -> None:
    found = planned(memory="1MiB", reserve="auto")
    more = found.what_if("1200KiB", time_limit=5)
    assert more.reserve == reserved(SMALL, "1200KiB", "auto", found.mesh)
    again = found.what_if("+64KiB", time_limit=5)
    assert again.reserve is not None
    assert again.reserve.budget_nbytes == budget_for(SMALL, found.memory.peak_nbytes, "auto", found.mesh) + 64 * KIB
    assert again.memory.peak_nbytes <= again.reserve.limit_nbytes
    with pytest.raises(FitError, match="a smaller reserve="):
        found.what_if("200KiB", time_limit=5)
    eight = Cluster.preset("8xA100-80").with_reserve(replace(SMALL.reserve, context_nbytes=2 * SMALL.reserve.context_nbytes))
    there = found.what_if(eight, time_limit=2)
    assert there.reserve == reserved(eight, "1MiB", "auto", there.mesh) != found.reserve


def test_a_reserve_above_the_budget_is_refused_before_any_work() -> None:
    fixed = CLUSTER.expected_reserve.parts(0)
    needed = sum(part.nbytes for part in fixed)
    with pytest.raises(FitError) as caught:
        planned(CLUSTER, needed - 1, "auto")
    told = str(caught.value)
    assert f"beside the plan it needs {format_nbytes(needed)}: {', '.join(map(str, fixed))}. Nothing is left" in told
    assert f"give memory= of more than {format_least(needed)}, or a smaller reserve=" in told
    with pytest.raises(FitError, match="Nothing is left"):
        planned(CLUSTER, "1GiB", "1GiB")


@pytest.mark.parametrize("given", ["much", True, -1, "", 1.5])
def test_a_reserve_that_is_no_size_is_refused(given: object) -> None:
    with pytest.raises(PlanError, match="give None, 'auto', or a size such as '2GiB'"):
        planned(reserve=given)  # type: ignore[arg-type]
