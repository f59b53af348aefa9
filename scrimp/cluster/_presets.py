"""Devices by name, with published figures. Rates are per direction: half, where a data sheet adds both.

Host memory and the links between nodes are those of the vendor's own server, where there is one. Figures marked as assumed are in
no data sheet: put your own in a file (`Cluster.load`) if they matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from difflib import get_close_matches

from scrimp.cluster._hardware import Hardware, Shares
from scrimp.cluster._link import Link
from scrimp.errors import ScrimpError
from scrimp.ledger import parse_nbytes

NVLINK, PCIE, INFINIBAND, ETHERNET, GLOO = 5.0, 10.0, 10.0, 50.0, 50.0  # microseconds a message; assumed
DEVICES_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Kind:
    """TFLOP/s; GB/s; `inside` and `between`: GB/s per device and microseconds."""

    memory: str
    bf16: float
    fp32: float
    memory_rate: float
    host_memory: str
    host_link: float
    inside: tuple[float, float]
    between: tuple[float, float]
    shares: Shares = field(default_factory=Shares)


def _a100(memory: str, memory_rate: float, host_memory: str) -> Kind:
    # NVIDIA A100 data sheet (SXM): 312 dense, 19.5; NVLink 600 GB/s and PCIe 4.0 64 GB/s, both directions. DGX A100 data
    # sheet: eight 200 Gb/s adapters for eight GPUs; 1 TB of memory with 40 GB GPUs, 2 TB with 80 GB.
    return Kind(
        memory=memory, bf16=312, fp32=19.5, memory_rate=memory_rate, host_memory=host_memory, host_link=32,
        inside=(300, NVLINK), between=(25, INFINIBAND),
    )  # fmt: skip


def _hopper(memory: str, memory_rate: float) -> Kind:
    # NVIDIA H100 and H200 data sheets (SXM): 1,979 with sparsity, so 989.5 dense; 67; NVLink 900 GB/s and PCIe 5.0 128 GB/s, both
    # directions. DGX H100 and H200 data sheets: 400 Gb/s for each GPU; 2 TB.
    return Kind(
        memory=memory, bf16=989.5, fp32=67, memory_rate=memory_rate, host_memory="2TB", host_link=64,
        inside=(450, NVLINK), between=(50, INFINIBAND), shares=Shares(matmul=0.8),  # measured: docs/results, Rehearsals
    )  # fmt: skip


def _v100(memory: str) -> Kind:
    # NVIDIA V100 data sheet (NVLink): 125 in fp16, it has no bf16; 15.7; 900 GB/s; NVLink 300 GB/s and PCIe 3.0 32 GB/s, both
    # directions. DGX-1 data sheet: four 100 Gb/s adapters for eight GPUs; 512 GB.
    return Kind(
        memory=memory, bf16=125, fp32=15.7, memory_rate=900, host_memory="512GB", host_link=16,
        inside=(150, NVLINK), between=(6.25, INFINIBAND),
    )  # fmt: skip


def _card(memory: str, bf16: float, fp32: float, memory_rate: float, between: float) -> Kind:
    # Cards without NVLink in a server of eight: PCIe 4.0 x16 has 32 GB/s each way (PCI-SIG); of it half is assumed where cards
    # talk, since it goes through the host. Host memory: assumed.
    return Kind(
        memory=memory, bf16=bf16, fp32=fp32, memory_rate=memory_rate, host_memory="512GB", host_link=32,
        inside=(16, PCIE), between=(between, ETHERNET),
    )  # fmt: skip


KINDS = {
    "A100-40": _a100("40GiB", 1555, "1TB"),  # 1,555 GB/s: A100 40GB data sheet
    "A100-80": _a100("80GiB", 2039, "2TB"),  # 2,039 GB/s: A100 80GB data sheet
    "H100": _hopper("80GiB", 3350),  # 3.35 TB/s: H100 data sheet
    "H200": _hopper("141GB", 4800),  # 141 GB, 4.8 TB/s: H200 data sheet
    # DGX B200 data sheet: 1,440 GB and 64 TB/s for eight; 14.4 TB/s NVLink for eight, both directions; 400 Gb/s for each; 2 TB.
    # NVIDIA Blackwell architecture brief (HGX B200): 2.25 PFLOP/s dense, 80; PCIe 5.0.
    "B200": Kind(
        memory="180GB",
        bf16=2250,
        fp32=80,
        memory_rate=8000,
        host_memory="2TB",
        host_link=64,
        inside=(900, NVLINK),
        between=(50, INFINIBAND),
    ),
    "V100-16": _v100("16GiB"),
    "V100-32": _v100("32GiB"),
    "L40S": _card("48GiB", 362.05, 91.6, 864, 12.5),  # L40S data sheet; a 200 Gb/s adapter for two is assumed
    # NVIDIA Ada architecture white paper: 165.2 with fp32 sums, 82.6, 1,008 GB/s. 100 Gb/s for eight is assumed.
    "RTX4090": _card("24GiB", 165.2, 82.6, 1008, 100 / 64),
    # NVIDIA GA102 architecture white paper: 71 with fp32 sums, 35.6, 936 GB/s. 100 Gb/s for eight is assumed.
    "RTX3090": _card("24GiB", 71, 35.6, 936, 100 / 64),
    "24GiB": _card("24GiB", 70, 35, 900, 100 / 64),  # any card of that size: assumed, about an RTX 3090
    # Processes of one machine that talk by gloo, a core each: all assumed. `Cluster.probe` measures a real one.
    "CPU": Kind(
        memory="4GiB",
        bf16=0.05,
        fp32=0.1,
        memory_rate=10,
        host_memory="64GiB",
        host_link=5,
        inside=(1, GLOO),
        between=(1, GLOO),
    ),
}

_NAME = re.compile(r"([0-9]{1,9})x(.+)")


def preset(name: str) -> Hardware:
    """`"8xA100-80"`; upper or lower case."""
    match = _NAME.fullmatch(name.strip())
    kinds = {kind.lower(): kind for kind in KINDS}
    if match is None or match[2].lower() not in kinds:
        count, kind = (match[1], match[2]) if match is not None else ("8", name.strip())
        begin = [each for each in kinds if kind and each.startswith(kind.lower())]
        near = [f"{count}x{kinds[each]}" for each in begin or get_close_matches(kind.lower(), kinds, 3)]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ScrimpError(f"cluster '{name}': write <count>x<kind>, such as 8xH100; kinds are {', '.join(KINDS)}{hint}")
    return hardware(kinds[match[2].lower()], int(match[1]))


def hardware(kind: str, count: int) -> Hardware:
    """`count` devices in nodes of eight; processes of a CPU are all on one machine."""
    per_node = count if kind == "CPU" else min(count, DEVICES_PER_NODE)
    if count < 1 or count % per_node:
        raise ScrimpError(
            f"a cluster of {count} {kind}: nodes have {DEVICES_PER_NODE} devices, so write a count below that or a multiple "
            f"of it; for other nodes write a file for Cluster.load. Kinds are {', '.join(KINDS)}"
        )
    figures = KINDS[kind]
    return Hardware(
        kind=kind,
        nodes=count // per_node,
        devices_per_node=per_node,
        device_memory_nbytes=parse_nbytes(figures.memory),
        bf16_flops=figures.bf16 * 1e12,
        fp32_flops=figures.fp32 * 1e12,
        device_memory=figures.memory_rate * 1e9,
        host_memory_nbytes=parse_nbytes(figures.host_memory),
        host_link=figures.host_link * 1e9,
        inside=_link(figures.inside),
        between=_link(figures.between),
        shares=figures.shares,
    )


def _link(figures: tuple[float, float]) -> Link:
    gb_per_s, microseconds = figures
    return Link(latency_seconds=microseconds / 1e6, bytes_per_second=gb_per_s * 1e9)
