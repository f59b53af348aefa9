"""What a device needs beside a plan: parts that add up, a limit that is the most that fits, and cluster files that keep it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp import Cluster, Mesh, ScrimpError
from scrimp.cluster import KINDS, Reserve, groups_of

sizes = st.integers(0, 1 << 38)
shares = st.floats(0.0, 2.0)
reserves = st.builds(
    lambda context, workspace, rounding, fragmentation, channels, connection: Reserve(
        device="some", context_nbytes=context, workspace_nbytes=workspace, rounding_share=rounding,
        fragmentation_share=fragmentation, nccl_channels=channels, nccl_connection_nbytes=connection,
    ),
    sizes, sizes, shares, shares, st.integers(0, 64), st.integers(0, 1 << 26),
)  # fmt: skip
MEASURED = Reserve(
    device="some", torch="2.12", context_nbytes=500 << 20, workspace_nbytes=64 << 20, rounding_share=0.01,
    fragmentation_share=0.1, nccl_channels=8, nccl_connection_nbytes=10 << 20,
    measured=("context", "workspace"), observed=(("kept", 32 << 20),),
)  # fmt: skip


@given(reserves, st.integers(0, 1 << 42), st.lists(st.integers(1, 1024), max_size=4))
def test_the_limit_is_the_most_of_which_the_need_is_within_the_budget(reserve: Reserve, budget: int, groups: list[int]) -> None:
    live = reserve.live_nbytes(budget, groups)
    if live < 0:
        assert reserve.needed_nbytes(0, groups) == budget - live > budget
    else:
        assert reserve.needed_nbytes(live, groups) <= budget < reserve.needed_nbytes(live + 1, groups)


@given(reserves, sizes, st.lists(st.integers(1, 1024), max_size=4))
def test_the_parts_add_up_to_the_need_and_none_is_empty(reserve: Reserve, live: int, groups: list[int]) -> None:
    parts = reserve.parts(live, groups)
    assert live + sum(part.nbytes for part in parts) == reserve.needed_nbytes(live, groups)
    assert all(part.nbytes > 0 for part in parts)


@given(reserves, st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_a_larger_budget_has_a_limit_that_is_no_smaller(reserve: Reserve, one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert reserve.live_nbytes(small) <= reserve.live_nbytes(large)


@pytest.mark.parametrize(
    ("mesh", "stages", "groups"),
    [
        ("x=1", 1, []),
        ("x=8", 1, [8, 8]),
        ("x=2,y=4", 1, [2, 4, 8, 8]),
        ("x=2,y=1", 1, [2, 2]),
        ("x=2", 4, [2, 8]),
        ("x=2,y=3,z=5", 1, [2, 3, 5, 6, 10, 15, 30, 30]),
    ],
)
def test_a_device_has_a_communicator_for_each_set_of_axes_and_one_of_all_ranks(mesh: str, stages: int, groups: list[int]) -> None:
    assert sorted(groups_of(Mesh.parse(mesh), stages)) == groups


def test_a_communicator_takes_channels_times_peers_times_a_connection() -> None:
    assert [MEASURED.communicator_nbytes(ranks) >> 20 for ranks in (1, 2, 3, 1000)] == [0, 80, 160, 160]
    names = [(part.name, part.source) for part in MEASURED.parts(1 << 30, (2,))]
    assert names == [
        ("context", "measured"), ("workspace", "measured"), ("rounding", "estimated"), ("fragmentation", "estimated"),
        ("NCCL", "estimated"),
    ]  # fmt: skip


def test_a_rehearsal_gives_the_allocators_shares() -> None:
    found = MEASURED.rehearsed(0.002, 0.03)
    assert (found.rounding_share, found.fragmentation_share) == (0.002, 0.03)
    assert found.measured == ("context", "workspace", "rounding", "fragmentation")
    assert found.context_nbytes == MEASURED.context_nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_cpu_needs_nothing_and_every_other_kind_something(kind: str) -> None:
    parts = Cluster.preset(f"2x{kind}").beside(1 << 30, Mesh.parse("x=2"))
    assert [part.name for part in parts] == (
        [] if kind == "CPU" else ["context", "workspace", "rounding", "fragmentation", "NCCL"]
    )


def test_a_cluster_without_devices_needs_nothing() -> None:
    assert Cluster().beside(1 << 30, Mesh.parse("x=2")) == ()


def test_what_was_measured_has_precedence_and_stays_with_more_nodes() -> None:
    cluster = Cluster.preset("8xA100-80").with_reserve(MEASURED)
    assert cluster.expected_reserve == cluster.with_nodes(2).expected_reserve == MEASURED
    assert cluster.with_reserve(None) == Cluster.preset("8xA100-80")


def test_a_clusters_file_keeps_it_and_older_files_have_none() -> None:
    plain = Cluster.preset("8xA100-80")
    cluster = plain.with_reserve(MEASURED)
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert '"version": 4' in cluster.to_json()
    assert '"version": 2' in plain.to_json()  # which older readers know
    assert Cluster.from_json(plain.to_json()).reserve is None
    assert Cluster.from_json(Cluster().to_json()).reserve is None


def test_rows_say_what_was_measured() -> None:
    rows = {row[0].strip(): row[1:] for row in MEASURED.rows()}
    assert rows["context"] == ("500.0 MiB", "measured")
    assert rows["NCCL"] == ("8 channels x 2 peers x 10.0 MiB a communicator, at most", "estimated")
    assert rows["kept"] == ("33,554,432 B", "measured")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context_nbytes": -1}, "context_nbytes=-1: it is a whole number"),
        ({"workspace_nbytes": 1.5}, "workspace_nbytes=1.5: it is a whole number"),
        ({"rounding_share": -0.1}, "rounding_share=-0.1: a share is 0 or more"),
        ({"fragmentation_share": float("inf")}, "a share is 0 or more"),
        ({"measured": ("contest",)}, "the parts are context, workspace"),
    ],
)
def test_wrong_reserves_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ScrimpError, match=words):
        replace(MEASURED, **change)
    with pytest.raises(ScrimpError, match="reserve cannot be read"):
        Reserve.from_data({"device": "some"})
