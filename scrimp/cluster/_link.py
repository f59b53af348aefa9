"""A link, and the cost of a transfer over it."""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.errors import ScrimpError


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one device gets along a mesh axis.

    >>> import scrimp
    >>> scrimp.Link(latency_seconds=1e-5, bytes_per_second=1e9).seconds(messages=1, nbytes=1e9)
    1.00001
    """

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

    def to_data(self) -> dict[str, float]:
        return {"latency_seconds": self.latency_seconds, "bytes_per_second": self.bytes_per_second}


DEFAULT_LINK = Link()
