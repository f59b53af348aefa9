"""Measured rates of one machine: its device, the link to it, the host's memory, a disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from scrimp.errors import ScrimpError


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Bytes per second, except for `flops`: FLOP/s of a bf16 matmul.

    `up` and `down`: copies from host to device and back, alone; `up_both` and `down_both`: when both run. `host_update`: memory
    that the host's update reads and writes with `threads` threads; `host_update_copying`: while copies run both ways.
    `device_memory`: read and written by the device. `disk_read`, `disk_write`: None where no disk was measured."""

    device: str
    threads: int
    flops: float
    up: float
    down: float
    up_both: float
    down_both: float
    host_update: float
    host_update_copying: float
    device_memory: float
    disk_read: float | None = None
    disk_write: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "device" and value is not None and not 0 < value < float("inf"):
                raise ScrimpError(f"a machine with {name}={value!r}: rates are more than 0")

    def copy_seconds(self, up_nbytes: float, down_nbytes: float) -> float:
        """The least time for so many bytes each way: both directions at once, then the rest alone."""
        both = min(up_nbytes / self.up_both, down_nbytes / self.down_both)
        alone = max(up_nbytes - both * self.up_both, 0) / self.up + max(down_nbytes - both * self.down_both, 0) / self.down
        # Where the directions share bandwidth, running both gains nothing.
        return min(both + alone, up_nbytes / self.up + down_nbytes / self.down)

    def rows(self) -> list[tuple[str, str]]:
        """A name and a figure each, as text."""
        rows = [
            ("device", self.device),
            ("compute, bf16", f"{self.flops / 1e12:.4g} TFLOP/s"),
            ("device memory", _rate(self.device_memory)),
            ("copies up", f"{_rate(self.up)} alone, {_rate(self.up_both)} with copies down"),
            ("copies down", f"{_rate(self.down)} alone, {_rate(self.down_both)} with copies up"),
            (
                f"host update, {self.threads} thread{'s' if self.threads > 1 else ''}",
                f"{_rate(self.host_update)} alone, {_rate(self.host_update_copying)} with copies both ways",
            ),
        ]
        if self.disk_read is not None and self.disk_write is not None:
            rows.append(("disk", f"{_rate(self.disk_read)} read, {_rate(self.disk_write)} written"))
        return rows

    def to_data(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Machine:
        unknown = {*data} - {field.name for field in fields(cls)}
        missing = {field.name for field in fields(cls) if field.default is not None} - {*data}
        if unknown or missing:
            raise ScrimpError(f"a machine's figures: {sorted(unknown)} are unknown, {sorted(missing)} are missing")
        return cls(**data)


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.4g} GB/s"
