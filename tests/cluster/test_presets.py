"""Clusters to plan for: presets, files, links of mesh axes, meshes, seconds of an operator."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from scrimp.cluster import Cluster, Hardware, Link
from scrimp.cluster._presets import KINDS
from scrimp.errors import ScrimpError
from scrimp.layout import Mesh
from scrimp.move import synthesize

DOC = Path(__file__).parents[2] / "docs" / "explanation" / "cluster.md"


def built(cluster: Cluster) -> Hardware:
    assert cluster.hardware is not None
    return cluster.hardware


# Presets.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_every_preset(kind: str, count: int) -> None:
    cluster = Cluster.preset(f"{count}x{kind}")
    hardware = built(cluster)
    assert hardware.devices == count
    assert hardware.devices_per_node == (count if kind == "CPU" else min(count, 8))
    assert hardware.inside.bytes_per_second >= hardware.between.bytes_per_second
    assert hardware.bf16_flops > hardware.fp32_flops or kind == "CPU"
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert Cluster.preset(f"{count}x{kind.lower()}") == cluster


def test_figures_that_stand_in_data_sheets() -> None:
    a100, h200 = built(Cluster.preset("8xA100-80")), built(Cluster.preset("16xH200"))
    assert (a100.device_memory_nbytes, a100.bf16_flops, a100.device_memory) == (80 * 2**30, 312e12, 2039e9)
    assert (h200.nodes, h200.devices_per_node, h200.device_memory_nbytes) == (2, 8, 141 * 10**9)
    assert h200.inside == Link(latency_seconds=5e-6, bytes_per_second=450e9)
    assert h200.between == Link(latency_seconds=10e-6, bytes_per_second=50e9)


@pytest.mark.parametrize("name", ["8xTPU", "H100", "x8", "8", "", "8xH100x2", "-8xH100", "1.5xH100"])
def test_an_unknown_name_lists_the_kinds(name: str) -> None:
    with pytest.raises(ScrimpError, match=r"<count>x<kind>.*A100-40, A100-80, H100, .*CPU"):
        Cluster.preset(name)


@pytest.mark.parametrize("name", ["0xH100", "12xH100", "0xCPU"])
def test_a_bad_count(name: str) -> None:
    with pytest.raises(ScrimpError, match=r"multiple of it.*Cluster\.load.*A100-40"):
        Cluster.preset(name)


# Files.


def toml_of_the_docs() -> str:
    found = re.search(r"```toml[^\n]*\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert found
    return found[1]


def test_the_file_of_the_docs(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(toml_of_the_docs())
    cluster = Cluster.load(file)
    assert Cluster.load(str(file)) == Cluster.load(toml_of_the_docs()) == cluster
    preset = built(Cluster.preset("32xA100-80"))
    assert built(cluster) == replace(preset, host_memory_nbytes=10**12)
    own = Cluster.load(toml_of_the_docs().replace('"A100-80"', '"mine"'))
    assert built(own) == replace(built(cluster), kind="mine")


def test_a_kind_gives_what_a_file_leaves_out() -> None:
    cluster = Cluster.load('nodes = 2\ndevices_per_node = 4\nkind = "V100-16"\n[inside]\ngb_per_s = 12\n[shares]\nmatmul = 1')
    hardware = built(cluster)
    assert (hardware.devices, hardware.device_memory_nbytes) == (8, 16 * 2**30)
    assert hardware.inside == Link(latency_seconds=5e-6, bytes_per_second=12e9)
    assert (hardware.shares.matmul, hardware.shares.memory) == (1, 0.8)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("nodes = 4\n", "", r"'nodes' is missing"),
        ("nodes = 4", "nodes = 0", r"'nodes': 0 is not a whole number"),
        ("nodes = 4", "nodes = true", r"'nodes': True is not"),
        ("nodes = 4", "nods = 4", r"'nods' is unknown; the top level may have kind, nodes, devices_per_node, device, host"),
        ('kind = "A100-80"', "kind = 3", r"'kind': 3 is not a text"),
        ('memory = "80GiB"', 'memory = "80 apples"', r"'device\.memory': '80 apples' is not a size"),
        ("bf16_tflops = 312", "bf16_tflops = -1", r"'device\.bf16_tflops': -1 is not a number above 0"),
        ("bf16_tflops = 312", 'bf16_tflops = "fast"', r"'device\.bf16_tflops': 'fast' is not a number"),
        ("bf16_tflops = 312", "tflops = 312", r"'device\.tflops' is unknown; \[device\] may have memory, bf16_tflops"),
        ("latency_us = 5", "latency_us = -5", r"'inside\.latency_us': -5 is not a number of 0 or more"),
        ("matmul = 0.6", "matmul = 1.5", r"matmul=1\.5"),
        ("[shares]", "[shares", r"is not TOML"),
    ],
)
def test_a_file_is_refused_by_the_key(old: str, new: str, says: str) -> None:
    text = toml_of_the_docs()
    assert old in text
    with pytest.raises(ScrimpError, match=says):
        Cluster.load(text.replace(old, new, 1))


def test_files_that_are_not_enough() -> None:
    with pytest.raises(ScrimpError, match=r"'device\.memory' is missing.*A100-40"):
        Cluster.load("nodes = 1\ndevices_per_node = 2")
    without = re.sub(r"\[between\].*?\n\n", "", toml_of_the_docs().replace("A100-80", "mine"), flags=re.DOTALL)
    with pytest.raises(ScrimpError, match=r"'between\.latency_us' is missing"):
        Cluster.load(without)
    with pytest.raises(ScrimpError, match=r"'host' is a table of memory, gb_per_s, not 3"):
        Cluster.load("nodes = 1\ndevices_per_node = 2\nhost = 3")
    with pytest.raises(ScrimpError, match=r"nowhere\.toml cannot be read"):
        Cluster.load("nowhere.toml")


def test_json_of_clusters_with_hardware() -> None:
    cluster = Cluster.preset("8xH100")
    data = json.loads(cluster.to_json())
    assert data["version"] == 2
    assert json.loads(Cluster().to_json())["version"] == 1
    with pytest.raises(ScrimpError, match=r"version 5, .* version 1 or 2 or 3 or 4"):
        Cluster.from_json(json.dumps({**data, "version": 5}))
    data["hardware"]["cores"] = data["hardware"].pop("nodes")
    with pytest.raises(ScrimpError, match=r"'cores'.*'nodes'"):
        Cluster.from_json(json.dumps(data))


# Meshes.


def peers_inside(mesh: Mesh, axis: str, per_node: int) -> float:
    """By counting pairs of ranks that differ on this axis alone."""
    pairs = [
        (a // per_node) == (b // per_node)
        for a in range(mesh.size)
        for b in range(mesh.size)
        if a != b and all((mesh.coordinate(a, x) == mesh.coordinate(b, x)) != (x == axis) for x in mesh.names)
    ]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("name", ["1xH100", "4xA100-40", "8xH100", "16xH100", "64xB200", "24xV100-16", "6xCPU"])
def test_meshes_and_the_links_of_their_axes(name: str) -> None:
    cluster = Cluster.preset(name)
    hardware = built(cluster)
    shapes = cluster.meshes()
    assert shapes == Cluster.preset(name).meshes()
    assert 1 <= len({*shapes}) == len(shapes) <= 12
    assert {mesh.size for mesh in shapes} == {hardware.devices}
    assert max(len(mesh.axes) for mesh in shapes) <= 3
    assert {len(mesh.axes) for mesh in cluster.meshes(1)} == {1}
    for mesh in shapes:
        sizes = [size for _, size in mesh.axes]
        inner = [prod(sizes[k:]) for k in range(1, len(sizes))]
        assert not inner or any(hardware.devices_per_node % size == 0 for size in inner)
        for axis, each in cluster.axis_links(mesh).items():
            expected = peers_inside(mesh, axis, hardware.devices_per_node) if mesh.axis_size(axis) > 1 else 1
            assert each.inside == pytest.approx(expected)
            assert each.link == (hardware.inside_link if expected == 1 else hardware.between_link)


def test_shapes_worth_a_search() -> None:
    def shapes(name: str, most: int = 3) -> list[tuple[int, ...]]:
        return [tuple(size for _, size in mesh.axes) for mesh in Cluster.preset(name).meshes(most)]

    assert shapes("8xH100") == [(8,), (2, 4), (2, 2, 2)]
    assert shapes("16xH100", 2) == [(16,), (2, 8), (4, 4), (8, 2)]
    assert shapes("1024xH100")[3:] == [(512, 2), (2, 64, 8), (4, 32, 8), (8, 16, 8), (128, 2, 4)]
    for wrong in (0, 7):
        with pytest.raises(ScrimpError, match=f"up to {wrong} axes"):
            Cluster.preset("8xH100").meshes(wrong)


def test_an_axis_that_is_not_aligned_with_nodes_is_slow() -> None:
    cluster = Cluster.preset("24xH100")
    links = cluster.axis_links(Mesh({"x": 8, "y": 3}))  # 0 1 2 | 3 4 5 | 6 7 8: the third triple is cut
    assert links["y"].link == built(cluster).between_link
    assert 0 < links["y"].inside < 1
    assert {each.link for each in cluster.axis_links(Mesh({"x": 2, "y": 4})).values()} == {built(cluster).inside_link}
    with pytest.raises(ScrimpError, match=r"mesh x=5,y=5 has 25 devices, the cluster 24 \(3 nodes of 8\)"):
        cluster.axis_links(Mesh({"x": 5, "y": 5}))


def test_moves_take_the_links_of_the_mesh() -> None:
    cluster, mesh, shape = Cluster.preset("16xH100"), Mesh({"x": 2, "y": 8}), (1024, 1024, 1024)
    inside = synthesize(shape, mesh, "[y,-,-]", "[-,-,y]", cluster=cluster)
    between = synthesize(shape, mesh, "[x,-,-]", "[-,-,x]", cluster=cluster, direct=False)
    assert [step.kind for step in inside.steps] == ["all_to_all"]
    assert inside.seconds == built(cluster).inside_link.seconds(7, 7 / 64 * 2**32)
    assert between.seconds <= built(cluster).between_link.seconds(1, 2**32 / 4)
    assert synthesize(shape, mesh, "[y,-,-]", "[-,-,y]", cluster=cluster.on(mesh)) == inside
    assert Cluster().on(mesh) == Cluster()
    slow = Link(bytes_per_second=1e9)
    assert replace(cluster, axes=(("y", slow),)).on(mesh).link(["y"]) == slow
    assert replace(cluster, axes=(("y", slow),)).on(mesh).link(["x"]) == built(cluster).between_link


# Seconds.


def test_seconds_of_an_operator() -> None:
    cluster = Cluster.preset("8xA100-80")
    flops, nbytes = 2.0 * 8192**3, 3.0 * 2 * 8192**2
    assert cluster.compute_seconds(flops, nbytes) == pytest.approx(flops / (312e12 * 0.6) + 5e-6)
    assert cluster.compute_seconds(flops, nbytes, "float32") == pytest.approx(flops / (19.5e12 * 0.6) + 5e-6)
    assert cluster.compute_seconds(8192, nbytes) == pytest.approx(nbytes / (2039e9 * 0.8) + 5e-6)
    assert cluster.compute_seconds(0, 0) == 5e-6
    with pytest.raises(ScrimpError, match=r"compute_seconds needs device data.*preset"):
        Cluster().compute_seconds(1, 1)


@pytest.mark.parametrize(
    "wrong", [{"nodes": 0}, {"nodes": 1.5}, {"bf16_flops": 0.0}, {"device_memory": float("nan")}, {"launch_seconds": -1.0}]
)
def test_hardware_that_cannot_be(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ScrimpError, match=name):
        replace(built(Cluster.preset("8xH100")), **wrong)  # type: ignore[arg-type]


def test_a_path_is_a_path_and_json_is_read(tmp_path: Path) -> None:
    """A path may have an `=` in it, and what `to_json` writes is read from a file and as it is."""
    (folder := tmp_path / "lr=0.1").mkdir()
    file, written = folder / "a=b.toml", folder / "a=b.json"
    file.write_text(toml_of_the_docs())
    cluster = Cluster.load(file)
    assert Cluster.load(str(file)) == cluster
    written.write_text(cluster.to_json())
    assert Cluster.load(written) == Cluster.load(str(written)) == Cluster.load(cluster.to_json()) == cluster
    assert Cluster.load("nodes=1\ndevices_per_node=2\nkind='V100-16'").hardware is not None
    for missing in (str(folder / "none.toml"), str(folder / "none.json")):
        with pytest.raises(ScrimpError, match=r"cluster file .*lr=0\.1.none\.\w+ cannot be read: there is no such file"):
            Cluster.load(missing)
    written.write_text("{")
    with pytest.raises(ScrimpError, match=r"a=b\.json is not JSON"):
        Cluster.load(written)
    written.write_text('{"format": "scrimp.cluster", "version": 2}')
    with pytest.raises(ScrimpError, match=r"a=b\.json is not a cluster of `to_json`: KeyError 'default'"):
        Cluster.load(written)
