"""Advice for a model that does not fit the cluster's devices: the engine trains it without a plan, offloading to host memory."""

from __future__ import annotations

from math import prod

from scrimp.capture import Graph
from scrimp.cluster import Cluster
from scrimp.ledger import format_nbytes
from scrimp.planner.cost.zero_levels import Precision


def host_tier(graph: Graph, cluster: Cluster, precision: Precision, limit_nbytes: int) -> str:
    """The text that is appended to the error message."""
    numbers = {parameter.name: prod(parameter.shape) for parameter in graph.parameters if not parameter.buffer}
    trained = {parameter.name for parameter in graph.parameters if parameter.trained}
    nbytes = sum(
        count * (precision.weight + (precision.gradient + precision.states if name in trained else 0))
        for name, count in numbers.items()
    )
    host = 0 if cluster.hardware is None else cluster.hardware.host_memory_nbytes
    enough = nbytes <= host
    disk = "" if enough else ", disk='folder'"
    where = (
        f"in the host's memory (a node has {format_nbytes(host)})"
        if enough
        else f"in the host's memory and, as a node has {format_nbytes(host)} of it, on disk"
    )
    return (
        f". Or train it without a plan: scrimp.Engine(..., memory=scrimp.Memory(device='{_budget(limit_nbytes)}'{disk})) keeps "
        f"{format_nbytes(nbytes)} of weights and optimizer states {where}, and brings a layer at a time to the device"
    )


def _budget(nbytes: int) -> str:
    """The size in the format that `Memory` reads."""
    return f"{nbytes >> 30}GiB" if nbytes >= 1 << 30 else f"{max(nbytes >> 20, 1)}MiB"
