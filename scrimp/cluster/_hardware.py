"""Published figures of a cluster's hardware, and the share of them that programs reach.

Peaks and shares are separate: a peak comes from a data sheet, a share from experience. For a measured machine, give the
measurements as peaks and shares of 1.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from scrimp.cluster._link import Link
from scrimp.errors import ScrimpError

HALF = ("bfloat16", "float16", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")  # at the rate of bf16; all others at that of fp32


MOST_DEVICES = 2**20


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Reachable share of the published rates: large matmuls, device memory, collectives."""

    matmul: float = 0.6
    memory: float = 0.8
    link: float = 0.8

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value <= 1:
                raise ScrimpError(f"a share {name}={value!r}: a share is above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Identical nodes. Rates are peaks: FLOP/s of matmuls (`bf16_flops` is that of fp16 where a device has no bf16), bytes per
    second of device memory, and between host and one device each way. `inside` and `between`: bandwidth of one device to others
    of its node and of other nodes. `host_memory_nbytes`: of a node."""

    kind: str
    nodes: int
    devices_per_node: int
    device_memory_nbytes: int
    bf16_flops: float
    fp32_flops: float
    device_memory: float
    host_memory_nbytes: int
    host_link: float
    inside: Link
    between: Link
    launch_seconds: float = 5e-6
    shares: Shares = Shares()

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node", "device_memory_nbytes", "host_memory_nbytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ScrimpError(f"hardware with {name}={value!r}: it is a whole number of 1 or more")
        if self.devices > MOST_DEVICES:
            raise ScrimpError(
                f"hardware with {self.nodes:,} nodes of {self.devices_per_node:,} devices: there may be at most {MOST_DEVICES:,} "
                "devices in all"
            )
        for name in ("bf16_flops", "fp32_flops", "device_memory", "host_link"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ScrimpError(f"hardware with {name}={getattr(self, name)!r}: rates are more than 0")
        if not 0 <= self.launch_seconds < float("inf"):
            raise ScrimpError(f"hardware with launch_seconds={self.launch_seconds!r}: it is 0 or more")

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def memory_rate(self) -> float:
        """Bytes per second of device memory at its reachable share."""
        return self.device_memory * self.shares.memory

    @property
    def host_rate(self) -> float:
        """Bytes per second between host and device, one way, at its reachable share."""
        return self.host_link * self.shares.link

    @property
    def inside_link(self) -> Link:
        """The link inside a node at its reachable share."""
        return self._shared(self.inside)

    @property
    def between_link(self) -> Link:
        return self._shared(self.between)

    def _shared(self, link: Link) -> Link:
        return Link(latency_seconds=link.latency_seconds, bytes_per_second=link.bytes_per_second * self.shares.link)

    def compute_seconds(self, flops: float, nbytes: float, dtype: str = "bfloat16") -> float:
        """Seconds of an operator with so many FLOPs in this dtype and so many bytes of memory traffic: the longer of the two,
        plus the launch."""
        peak = self.bf16_flops if dtype in HALF else self.fp32_flops
        return max(flops / (peak * self.shares.matmul), nbytes / self.memory_rate) + self.launch_seconds

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Hardware:
        names = {field.name for field in fields(cls)}
        if {*data} != names:
            unknown, missing = sorted({*data} - names), sorted(names - {*data})
            raise ScrimpError(f"a cluster's hardware: {unknown} are unknown, {missing} are missing")
        links = {name: Link(**data[name]) for name in ("inside", "between")}
        return cls(**{**data, **links, "shares": Shares(**data["shares"])})
