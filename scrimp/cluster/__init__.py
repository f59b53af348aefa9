"""Clusters: devices, links and measured rates, as data.

In:   a preset's name, a TOML or JSON file, or a probe of this machine.
Out:  a `Cluster`: seconds of a transfer, seconds of an operator, meshes worth a search.

    seconds = messages * latency + bytes / bandwidth        over the slowest link that a step crosses

Read in this order:

    _cluster.py    `Cluster`
    _link.py, _hardware.py, _machine.py, _operators.py    one link; published figures; measured figures
    _reserve.py    what a device needs beside a plan: context, workspace, rounding, fragmentation, NCCL
    _meshes.py     which link each axis of a mesh uses
    _presets.py, _toml.py    devices by name; a cluster from a file
    _measuring.py  who measures a machine: the engine registers its probe here
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.cluster._cluster import Cluster
    from scrimp.cluster._hardware import Hardware, Shares
    from scrimp.cluster._link import DEFAULT_LINK, Link
    from scrimp.cluster._machine import Machine
    from scrimp.cluster._measuring import register_measure
    from scrimp.cluster._meshes import AxisLink
    from scrimp.cluster._operators import CLASSES, OperatorRate, Operators
    from scrimp.cluster._presets import KINDS, hardware
    from scrimp.cluster._reserve import GIVEN, Reserve, ReservePart, groups_of

__all__ = [
    "CLASSES", "DEFAULT_LINK", "GIVEN", "KINDS", "AxisLink", "Cluster", "Hardware", "Link", "Machine", "OperatorRate",
    "Operators", "Reserve", "ReservePart", "Shares", "groups_of", "hardware", "register_measure",
]  # fmt: skip

__getattr__ = lazily(
    __name__,
    {
        "Cluster": "scrimp.cluster._cluster",
        "Hardware": "scrimp.cluster._hardware",
        "Shares": "scrimp.cluster._hardware",
        "DEFAULT_LINK": "scrimp.cluster._link",
        "Link": "scrimp.cluster._link",
        "Machine": "scrimp.cluster._machine",
        "register_measure": "scrimp.cluster._measuring",
        "AxisLink": "scrimp.cluster._meshes",
        "CLASSES": "scrimp.cluster._operators",
        "OperatorRate": "scrimp.cluster._operators",
        "Operators": "scrimp.cluster._operators",
        "KINDS": "scrimp.cluster._presets",
        "hardware": "scrimp.cluster._presets",
        "GIVEN": "scrimp.cluster._reserve",
        "Reserve": "scrimp.cluster._reserve",
        "ReservePart": "scrimp.cluster._reserve",
        "groups_of": "scrimp.cluster._reserve",
    },
)
