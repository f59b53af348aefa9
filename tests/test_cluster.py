"""Clusters: links by axis, JSON, what is refused."""

from __future__ import annotations

import pytest

from scrimp.cluster import Cluster, Link
from scrimp.errors import ScrimpError


def test_a_step_runs_at_the_pace_of_its_slowest_axis() -> None:
    slow, late = Link(bytes_per_second=1e9), Link(latency_seconds=1e-3)
    cluster = Cluster(axes=(("node", slow), ("rack", late)))
    assert cluster.link(["gpu"]) == Link(latency_seconds=10e-6, bytes_per_second=25e9)
    assert cluster.link(["gpu", "node.1"]) == slow
    assert cluster.link(["node", "rack"]) == Link(latency_seconds=1e-3, bytes_per_second=1e9)
    assert cluster.link(["node"]).seconds(2, 1e9) == pytest.approx(1.00002)


def test_json_round_trip_and_other_versions() -> None:
    cluster = Cluster(axes=(("node", Link(bytes_per_second=1e9)),))
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert Cluster(axes={"node": Link(bytes_per_second=1e9)}) == cluster  # type: ignore[arg-type]
    with pytest.raises(ScrimpError, match=r"version 7.*version 1"):
        Cluster.from_json(cluster.to_json().replace('"version": 1', '"version": 7'))


@pytest.mark.parametrize("wrong", [{"latency_seconds": -1.0}, {"bytes_per_second": 0.0}])
def test_a_link_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ScrimpError, match="latency must be 0 or more"):
        Link(**wrong)
