"""`Cluster`: links and the cost of a transfer over them; published figures of the hardware; measured figures of a machine.

A step of a move takes, on its busiest device,

    seconds = messages one after the other * latency + bytes received / bandwidth

over the slowest link among the axes the step crosses. Without a cluster every axis is the default link: 10 microseconds a
message, 25 GB/s per device. A cluster with known hardware has a link inside nodes and one between them, and `on(mesh)` gives each
axis its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scrimp.cluster._hardware import Hardware
from scrimp.cluster._link import DEFAULT_LINK, Link
from scrimp.cluster._machine import Machine
from scrimp.cluster._measuring import measure, measure_operators, measure_reserve
from scrimp.cluster._meshes import AxisLink, axis_links, meshes
from scrimp.cluster._operators import Operators
from scrimp.cluster._reserve import NOTHING, Reserve, ReservePart, groups_of, known_reserve
from scrimp.errors import ScrimpError, check_format
from scrimp.layout import Mesh

FORMAT, VERSION = "scrimp.cluster", 4


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`Cluster(axes=(("node", Link(bytes_per_second=3e9)),))`: node is slow, all other axes are the default. `machine`:
    what each of its machines was measured to do; `hardware`: what it is built of; `operators`: what the operators of a device
    were measured to take; `reserve`: what a device was measured to need beside a plan; each if that is known.

    >>> import scrimp
    >>> cluster = scrimp.Cluster.preset("16xH100")
    >>> cluster.hardware.nodes, cluster.hardware.devices
    (2, 16)
    >>> scrimp.Cluster.load(cluster.to_json()) == cluster
    True
    """

    default: Link = DEFAULT_LINK
    axes: tuple[tuple[str, Link], ...] = ()
    machine: Machine | None = None
    hardware: Hardware | None = None
    operators: Operators | None = None
    reserve: Reserve | None = None

    def __post_init__(self) -> None:
        if isinstance(self.axes, Mapping):
            object.__setattr__(self, "axes", tuple(self.axes.items()))

    @classmethod
    def probe(
        cls, device: str | None = None, disk: str | Path | None = None, *, operators: bool = False, reserve: bool = False
    ) -> Cluster:
        """Measures this machine: the device that an engine would use, the link to it, the host; and the disk of a folder, if one
        is given. Up to three seconds with a GPU, one without; once in a process. `operators`: also the rates of operators, by
        class and size, which takes up to half a minute; `with_operators` gives them to a cluster of such devices. `reserve`: also
        what a CUDA device needs beside a plan, in a process of its own, which takes some ten seconds; None on a CPU."""
        beside = measure_reserve(device) if reserve else None  # first, before this process loads more on the device
        return cls(machine=measure(device, disk), operators=measure_operators(device) if operators else None, reserve=beside)

    def with_operators(self, operators: Operators | None) -> Cluster:
        """The same cluster, whose devices were measured: its predicted seconds of operators follow the measurement."""
        return replace(self, operators=operators)

    def with_reserve(self, reserve: Reserve | None) -> Cluster:
        """The same cluster, whose devices were measured to need this beside a plan."""
        return replace(self, reserve=reserve)

    @property
    def expected_reserve(self) -> Reserve:
        """As measured, if it was; else the constants of its kind of devices; nothing where the cluster has no device data."""
        if self.reserve is not None:
            return self.reserve
        return NOTHING if self.hardware is None else known_reserve(self.hardware.kind)

    def beside(self, live_nbytes: int, mesh: Mesh, stages: int = 1) -> tuple[ReservePart, ...]:
        """What a device needs beside so many live bytes, by part; nothing on a CPU. `mesh`: of one of the `stages`."""
        return self.expected_reserve.parts(live_nbytes, groups_of(mesh, stages))

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """A cluster such as `"8xA100-80"`, with published figures; an unknown name lists the kinds. `scrimp clusters` shows
        them."""
        from scrimp.cluster._presets import preset

        return cls._of(preset(name))

    @classmethod
    def load(cls, source: str | Path) -> Cluster:
        """From a file or its text: TOML as in docs/explanation/cluster.md, or what `to_json` writes."""
        from scrimp.cluster._toml import hardware_of, read_source

        text, name = read_source(source)
        if text.lstrip().startswith("{"):
            try:
                return cls.from_json(text)
            except json.JSONDecodeError as error:
                raise ScrimpError(f"{name} is not JSON: {error}") from error
            except (KeyError, TypeError) as error:
                raise ScrimpError(f"{name} is not a cluster of `to_json`: {type(error).__name__} {error}") from error
        return cls._of(hardware_of(text, name))

    @classmethod
    def _of(cls, hardware: Hardware) -> Cluster:
        return cls(default=hardware.inside_link if hardware.nodes == 1 else hardware.between_link, hardware=hardware)

    def with_nodes(self, nodes: int) -> Cluster:
        """The same kind of nodes, `nodes` of them."""
        made = self._of(replace(self._known("with_nodes"), nodes=nodes))
        return replace(made, axes=self.axes, machine=self.machine, operators=self.operators, reserve=self.reserve)

    def axis_links(self, mesh: Mesh) -> Mapping[str, AxisLink]:
        """The link of each mesh axis, and the share of its peers that are inside nodes."""
        return axis_links(self._known("axis_links"), mesh)

    def on(self, mesh: Mesh) -> Cluster:
        """The cluster with a link for each axis of this mesh. Links given by axis stay."""
        if self.hardware is None:
            return self
        given = dict(self.axes)
        found = {name: given.get(name, each.link) for name, each in self.axis_links(mesh).items()}
        if len({*found.values()}) == 1 and not given:
            return replace(self, default=next(iter(found.values())))  # moves are planned faster with a single link
        return replace(self, axes=tuple({**given, **found}.items()))

    def meshes(self, max_axes: int = 3) -> tuple[Mesh, ...]:
        """The meshes over all devices that are worth a search, with axes inside nodes or between them; few axes first."""
        return meshes(self._known("meshes"), max_axes)

    def compute_seconds(self, flops: float, nbytes: float, dtype: str = "bfloat16", operators: str = "") -> float:
        """Seconds of an operator on one device: as measured for its class of operators, if it was; else the longer of its
        arithmetic and its memory traffic, plus the launch."""
        found = None if self.operators is None else self.operators.seconds(operators, flops, nbytes, dtype)
        return self._known("compute_seconds").compute_seconds(flops, nbytes, dtype) if found is None else found

    def _known(self, what: str) -> Hardware:
        if self.hardware is None:
            raise ScrimpError(f"Cluster.{what} needs device data: use Cluster.preset('8xH100') or Cluster.load(file)")
        return self.hardware

    def link(self, axes: Iterable[str]) -> Link:
        """The link of a step over these axes (sub-axes belong to their axis): the worst latency and the worst bandwidth."""
        table = dict(self.axes)
        links = [table.get(axis.partition(".")[0], self.default) for axis in axes] or [self.default]
        return Link(
            latency_seconds=max(link.latency_seconds for link in links),
            bytes_per_second=min(link.bytes_per_second for link in links),
        )

    def to_json(self) -> str:
        axes = {name: link.to_data() for name, link in self.axes}
        # What needs no later version has an earlier one, so that older readers can load it.
        version = VERSION if self.reserve else 3 if self.operators else 2 if self.hardware else 1
        data: dict[str, Any] = {"format": FORMAT, "version": version, "default": self.default.to_data(), "axes": axes}
        if self.machine is not None:
            data["machine"] = self.machine.to_data()
        if self.hardware is not None:
            data["hardware"] = self.hardware.to_data()
        if self.operators is not None:
            data["operators"] = self.operators.to_data()
        if self.reserve is not None:
            data["reserve"] = self.reserve.to_data()
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        data: dict[str, Any] = json.loads(text)
        check_format(data, FORMAT, (1, 2, 3, VERSION), ScrimpError)
        return cls(
            default=Link(**data["default"]),
            axes=tuple((name, Link(**row)) for name, row in data["axes"].items()),
            machine=Machine.from_data(data["machine"]) if "machine" in data else None,
            hardware=Hardware.from_data(data["hardware"]) if "hardware" in data else None,
            operators=Operators.from_data(data["operators"]) if "operators" in data else None,
            reserve=Reserve.from_data(data["reserve"]) if "reserve" in data else None,
        )
