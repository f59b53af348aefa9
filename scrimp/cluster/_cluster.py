"""Links and what a transfer over them costs; and the machine, where it was measured.

A step of a move takes, on its busiest device,

    seconds = messages one after the other * latency + bytes received / bandwidth

over the slowest link among the axes the step crosses. Without a cluster every axis is the default link:
10 microseconds a message, 25 GB/s per device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scrimp.cluster._machine import Machine
from scrimp.errors import ScrimpError, check_format

FORMAT, VERSION = "scrimp.cluster", 1


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one device gets along a mesh axis."""

    latency_seconds: float = 10e-6
    bytes_per_second: float = 25e9

    def __post_init__(self) -> None:
        if self.latency_seconds < 0 or self.bytes_per_second <= 0:
            raise ScrimpError(
                f"link with {self.latency_seconds} s a message and {self.bytes_per_second} B/s: "
                "latency must be 0 or more, bandwidth more than 0"
            )

    def seconds(self, messages: float, nbytes: float) -> float:
        return messages * self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`Cluster(axes=(("node", Link(bytes_per_second=3e9)),))`: node is slow, all other axes are the default. `machine`:
    what each of its machines can do, if that is known."""

    default: Link = Link()
    axes: tuple[tuple[str, Link], ...] = ()
    machine: Machine | None = None

    def __post_init__(self) -> None:
        if isinstance(self.axes, Mapping):
            object.__setattr__(self, "axes", tuple(self.axes.items()))

    @classmethod
    def probe(cls, device: str | None = None, disk: str | Path | None = None) -> Cluster:
        """This machine, measured: the device that an engine would take, the link to it, the host; and the disk of a
        folder, if one is given. Up to three seconds with a GPU, one without; once in a process."""
        from scrimp.engine._probe import probe

        return cls(machine=probe(device, disk))

    def link(self, axes: Iterable[str]) -> Link:
        """The link of a step over these axes (sub-axes belong to their axis): the slowest in each respect."""
        table = dict(self.axes)
        links = [table.get(axis.partition(".")[0], self.default) for axis in axes] or [self.default]
        return Link(
            latency_seconds=max(link.latency_seconds for link in links),
            bytes_per_second=min(link.bytes_per_second for link in links),
        )

    def to_json(self) -> str:
        def row(link: Link) -> dict[str, float]:
            return {"latency_seconds": link.latency_seconds, "bytes_per_second": link.bytes_per_second}

        axes = {name: row(link) for name, link in self.axes}
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION, "default": row(self.default), "axes": axes}
        if self.machine is not None:
            data["machine"] = self.machine.to_data()
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        data: dict[str, Any] = json.loads(text)
        check_format(data, FORMAT, VERSION, ScrimpError)
        return cls(
            default=Link(**data["default"]),
            axes=tuple((name, Link(**row)) for name, row in data["axes"].items()),
            machine=Machine.from_data(data["machine"]) if "machine" in data else None,
        )
