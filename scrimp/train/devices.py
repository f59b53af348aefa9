"""The cluster of a run: as named, or the devices of the ranks that run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scrimp.cluster import KINDS, Cluster, hardware
from scrimp.errors import ScrimpError
from scrimp.train.config.sections import AUTO

if TYPE_CHECKING:
    import torch

# The names of torch.cuda.get_device_name, and the kinds that are the same by them.
NAMES = (
    (r"A100.*80GB|A100-.*80", "A100-80"), (r"A100.*40GB", "A100-40"), (r"\bH100", "H100"), (r"\bH200", "H200"),
    (r"\bB200", "B200"),
    (r"V100.*32GB", "V100-32"), (r"V100.*16GB", "V100-16"), (r"L40S", "L40S"), (r"RTX 4090", "RTX4090"), (r"RTX 3090", "RTX3090"),
)  # fmt: skip


def cluster_of(text: str) -> Cluster:
    """Loads a file, known by its ending, else a preset."""
    return Cluster.load(Path(text)) if text.endswith((".toml", ".json")) else Cluster.preset(text)


def kind_of_device(name: str) -> str | None:
    """The kind of a GPU by the name that torch gives it; None if no preset has it."""
    return next((kind for pattern, kind in NAMES if kind in KINDS and re.search(pattern, name)), None)


def devices_of(name: str, device: torch.device, *, world: int, here: int, needed: bool = True) -> Cluster | None:
    """`name`: [cluster] name. "auto": `world` ranks, `here` of them on each machine; None if no preset has such devices, and none
    is needed."""
    if name != AUTO:
        return cluster_of(name)
    if device.type == "cpu":
        return Cluster.preset(f"{world}xCPU")
    import torch

    said = torch.cuda.get_device_name(device)
    kind = kind_of_device(said)
    if kind is None and not needed:
        return None
    if kind is None:
        raise ScrimpError(
            f"[cluster] name is 'auto', and no preset is a {said}: name a cluster (scrimp clusters), or write a file"
        )
    return Cluster(hardware=replace(hardware(kind, 1), devices_per_node=min(world, here))).with_nodes(max(1, world // here))


def rate_of(name: str, device: torch.device, precision: str) -> float | None:
    """FLOP/s of one GPU, as published; None on a CPU, and where no preset is known."""
    if device.type != "cuda":
        return None
    cluster = devices_of(name, device, world=1, here=1, needed=False)
    if cluster is None or cluster.hardware is None:
        return None
    return cluster.hardware.fp32_flops if precision == "fp32" else cluster.hardware.bf16_flops
