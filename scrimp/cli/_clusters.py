"""`scrimp clusters`: prints the known kinds of devices, or one cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scrimp.cli._end import UsageError, typed
from scrimp.cli._files import check_writable, write
from scrimp.cli.render.table import print_table
from scrimp.cluster import KINDS, Cluster, Hardware, Link, hardware
from scrimp.errors import ScrimpError
from scrimp.ledger import format_nbytes
from scrimp.train import cluster_of

if TYPE_CHECKING:
    from rich.console import Console


def show(console: Console, *, name: str | None, json_file: Path | None) -> None:
    if name is None:
        if json_file is not None:
            raise UsageError("--json writes one cluster: name it, such as scrimp clusters 8xH100 --json cluster.json")
        _kinds(console)
        return
    with typed():
        check_writable("--json", json_file)
        cluster = cluster_of(name)
    _one(console, cluster)
    if json_file is not None:
        write(json_file, cluster.to_json() + "\n")


def _kinds(console: Console) -> None:
    headers = ("kind", "memory", "bf16 TFLOP/s", "memory GB/s", "host GB/s", "inside GB/s", "between GB/s")
    rows = []
    for kind in KINDS:
        one = hardware(kind, 1)
        rates = (one.device_memory, one.host_link, one.inside.bytes_per_second, one.between.bytes_per_second)
        figures = [f"{rate / 1e9:.4g}" for rate in rates]
        rows.append((kind, format_nbytes(one.device_memory_nbytes), f"{one.bf16_flops / 1e12:.4g}", *figures))
    print_table(console, headers, rows, right=headers[1:])
    console.print("\nWrite <count>x<kind>, such as 16xH100. Peaks per device and direction, as published; nodes of eight.")


def _one(console: Console, cluster: Cluster) -> None:
    built = cluster.hardware
    if built is None:
        raise ScrimpError("this cluster has no device data to show")
    rows = _rows(built)
    for mesh in cluster.meshes():
        links = [f"{axis} {_where(each.inside)}" for axis, each in cluster.axis_links(mesh).items()]
        rows.append((f"mesh {mesh}", ", ".join(links)))
    print_table(console, ("", ""), rows, pieces="")


def _rows(built: Hardware) -> list[tuple[str, str]]:
    shares = built.shares
    return [
        ("devices", f"{built.devices} {built.kind}: {built.nodes} x {built.devices_per_node}"),
        ("device memory", f"{format_nbytes(built.device_memory_nbytes)}, {built.device_memory / 1e9:.4g} GB/s"),
        ("compute", f"{built.bf16_flops / 1e12:.4g} TFLOP/s in bf16, {built.fp32_flops / 1e12:.4g} in fp32"),
        ("host", f"{format_nbytes(built.host_memory_nbytes)} a node, {built.host_link / 1e9:.4g} GB/s to a device"),
        ("inside a node", _link(built.inside)),
        ("between nodes", _link(built.between)),
        ("taken of that", f"matmul {shares.matmul:g}, memory {shares.memory:g}, links {shares.link:g}"),
    ]


def _link(link: Link) -> str:
    return f"{link.bytes_per_second / 1e9:.4g} GB/s a device, {link.latency_seconds * 1e6:.4g} us a message"


def _where(share: float) -> str:
    if share in (0, 1):
        return "inside nodes" if share else "between nodes"
    return f"between nodes ({share:.0%} of its peers inside)"
