"""Clusters: links by axis, JSON, what is refused; the machine, as figures and measured."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from scrimp.cluster import Cluster, Link, Machine
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


FIGURES: dict[str, Any] = {
    "device": "some GPU", "threads": 16, "flops": 7e14, "up": 50.0, "down": 40.0, "up_both": 40.0, "down_both": 30.0,
    "host_update": 150.0, "host_update_copying": 60.0, "device_memory": 4e3,
}  # fmt: skip


def test_a_machine_goes_through_json_and_old_files_have_none() -> None:
    for machine in (Machine(**FIGURES), Machine(**FIGURES, disk_read=3.0, disk_write=2.0)):
        cluster = Cluster(axes=(("node", Link()),), machine=machine)
        assert Cluster.from_json(cluster.to_json()) == cluster
    assert "machine" not in json.loads(Cluster().to_json())
    old = '{"format": "scrimp.cluster", "version": 1, "default": {"latency_seconds": 1e-5, "bytes_per_second": 25e9}, "axes": {}}'
    assert Cluster.from_json(old) == Cluster()
    data = json.loads(Cluster(machine=Machine(**FIGURES)).to_json())
    data["machine"]["speed"] = data["machine"].pop("flops")
    with pytest.raises(ScrimpError, match=r"'speed'.*'flops'"):
        Cluster.from_json(json.dumps(data))


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "device"])
def test_a_machine_that_cannot_be(name: str) -> None:
    for wrong in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ScrimpError, match=name):
            Machine(**{**FIGURES, name: wrong})


def test_copies_both_ways_at_once_as_long_as_that_pays() -> None:
    machine = Machine(**FIGURES)
    assert machine.copy_seconds(100, 0) == 2
    assert machine.copy_seconds(0, 100) == 2.5
    assert machine.copy_seconds(40, 30) == 1
    assert machine.copy_seconds(140, 30) == 3  # the rest goes alone, and faster
    assert machine.copy_seconds(40, 110) == 3
    half = Machine(**{**FIGURES, "up_both": 20.0, "down_both": 10.0})  # slower than one after the other
    assert half.copy_seconds(100, 80) == 4


def test_this_machine_is_measured_once(tmp_path: Path) -> None:
    first = Cluster.probe("cpu").machine
    assert first is not None
    assert first.device == "cpu"
    start = time.perf_counter()
    again = Cluster.probe("cpu", tmp_path)
    assert time.perf_counter() - start < 20
    assert again.machine is not None
    assert Cluster.probe("cpu").machine is first
    assert again.machine.host_update == first.host_update
    assert again.machine.disk_read is not None
    assert not [*tmp_path.iterdir()]
    assert Cluster.from_json(again.to_json()) == again
    with pytest.raises(ScrimpError, match=r"nowhere cannot be measured: No such file"):
        Cluster.probe("cpu", tmp_path / "nowhere")


@pytest.mark.parametrize("wrong", [{"latency_seconds": -1.0}, {"bytes_per_second": 0.0}])
def test_a_link_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ScrimpError, match="latency must be 0 or more"):
        Link(**wrong)
