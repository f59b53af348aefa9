"""Measured rates of operators on one device, by class of operator and size.

A contraction (matrix product, attention, convolution) takes its FLOPs over a rate that grows with them; every other operator its
memory traffic over a rate that grows with that. Rates are measured at some sizes. Between them a rate is interpolated over the
logarithm of the size; below the smallest size a call takes as long as that one, because it is the launch that takes the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import isfinite, log
from typing import Any

from scrimp.errors import ScrimpError

# Classes whose size is FLOPs; of all others it is bytes read and written.
BY_FLOPS = (
    "matmul", "attention", "attention, backward", "causal attention", "causal attention, backward", "convolution",
    "convolution, backward",
)  # fmt: skip
BY_BYTES = (
    "normalization", "normalization, backward", "softmax", "lookup", "lookup, backward", "reduction", "reduction of rows",
    "transposing copy", "concatenation", "cast", "broadcast", "pointwise",
)  # fmt: skip
CLASSES = (*BY_FLOPS, *BY_BYTES)


@dataclass(frozen=True, kw_only=True)
class OperatorRate:
    """`points`: sizes and the seconds of a call of that size, sizes rising. `error`: the largest relative error of predictions
    for calls of other shapes that were measured too."""

    operators: str
    dtype: str
    points: tuple[tuple[float, float], ...]
    error: float

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if self.operators not in CLASSES:
            raise ScrimpError(f"rates of {self.operators!r}: the classes of operators are {', '.join(CLASSES)}")
        if not sizes or sizes != sorted({*sizes}) or not all(0 < each < float("inf") for point in self.points for each in point):
            raise ScrimpError(f"rates of {self.operators}, {self.dtype}: sizes must rise, and sizes and seconds must be above 0")
        if not isfinite(self.error) or self.error < 0:
            raise ScrimpError(f"rates of {self.operators}, {self.dtype}: an error of {self.error!r}; it is 0 or more")

    def seconds(self, size: float) -> float:
        """Of a call of this size."""
        first, last = self.points[0], self.points[-1]
        if size <= first[0]:
            return first[1]
        if size >= last[0]:
            return size / (last[0] / last[1])
        above = next(k for k, (known, _) in enumerate(self.points) if known >= size)
        (small, short), (large, long) = self.points[above - 1], self.points[above]
        share = log(size / small) / log(large / small)
        return size / ((1 - share) * small / short + share * large / long)


@dataclass(frozen=True, kw_only=True)
class Operators:
    """What the operators of one device were measured to take."""

    device: str
    rates: tuple[OperatorRate, ...]

    def seconds(self, operators: str, flops: float, nbytes: float, dtype: str) -> float | None:
        """Of one call; None if its class was not measured in this dtype. A contraction of few FLOPs is bound by memory."""
        found, copied = self._table.get((operators, dtype)), self._table.get(("pointwise", dtype))
        if found is None:
            return None
        if operators not in BY_FLOPS:
            return found.seconds(nbytes)
        return max(found.seconds(flops), 0.0 if copied is None else copied.seconds(nbytes))

    @cached_property
    def _table(self) -> Mapping[tuple[str, str], OperatorRate]:
        return {(rate.operators, rate.dtype): rate for rate in self.rates}

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Class, dtype, rate of the largest size, and prediction error, as text."""
        return [
            (each.operators, each.dtype, _rate(each), f"{100 * each.error:.1f} %") for each in self.rates
        ]  # fmt: skip

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Operators:
        try:
            rates = tuple(
                OperatorRate(**{**each, "points": tuple((size, seconds) for size, seconds in each["points"])})
                for each in data["rates"]
            )
            return cls(device=data["device"], rates=rates)
        except (KeyError, TypeError, ValueError) as error:
            raise ScrimpError(f"a cluster's operators cannot be read: {type(error).__name__} {error}") from error


def _rate(each: OperatorRate) -> str:
    size, seconds = each.points[-1]
    rate = size / seconds
    return f"{rate / 1e12:.4g} TFLOP/s" if each.operators in BY_FLOPS else f"{rate / 1e9:.4g} GB/s"
