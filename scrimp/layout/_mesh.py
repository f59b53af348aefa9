"""A mesh: named axes of devices, numbered row-major, the last axis fastest.

An axis `y` of size 12 has the prime sub-axes `y.0`, `y.1`, `y.2` of sizes 2, 2, 3, the first one major:
the coordinate on `y` is ((c0 * 2) + c1) * 3 + c2. An axis of prime size is its own only sub-axis, and an
axis of size 1 has none. Moves are planned over sub-axes, because two axes of unequal size may still share
a factor that can be swapped between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from scrimp.errors import LayoutError

AXIS_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, init=False)
class Mesh:
    """`Mesh({"x": 2, "y": 4})`: 8 devices; rank = 4 * x + y.

    >>> import scrimp
    >>> mesh = scrimp.Mesh.parse("x=2,y=4")
    >>> mesh.size, mesh.coordinate(5, "x"), mesh.coordinate(5, "y")
    (8, 1, 1)
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, axes: Mapping[str, int] | Iterable[tuple[str, int]]) -> None:
        pairs = tuple(axes.items() if isinstance(axes, Mapping) else axes)
        seen: set[str] = set()
        for name, size in pairs:
            if not isinstance(name, str) or not AXIS_NAME.fullmatch(name):
                raise LayoutError(f"mesh axis {name!r}: a name is a small letter, then small letters, digits or _")
            if name in seen:
                raise LayoutError(f"mesh axis '{name}' is given twice in {[n for n, _ in pairs]}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise LayoutError(f"mesh axis '{name}' has size {size!r}: a size is a whole number of 1 or more")
            seen.add(name)
        object.__setattr__(self, "axes", pairs)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """`"x=2,y=4"` -> `Mesh({"x": 2, "y": 4})`."""
        pairs: list[tuple[str, int]] = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            name, equals, size = part.partition("=")
            size = size.strip()
            if not equals or not (size.isascii() and size.isdigit() and len(size) < 10):
                raise LayoutError(
                    f"mesh '{text[:80]}': '{part[:40]}' is not of the form name=size, with a size of at most 9 digits "
                    "(example: x=2,y=4)"
                )
            pairs.append((name.strip(), int(size)))
        return cls(pairs)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def size(self) -> int:
        total = 1
        for _, size in self.axes:
            total *= size
        return total

    @cached_property
    def _table(self) -> dict[str, tuple[int, int]]:
        """(size, stride in the rank number) of every axis and every sub-axis."""
        table: dict[str, tuple[int, int]] = {}
        stride = 1
        for name, size in reversed(self.axes):
            table[name] = (size, stride)
            inner = stride
            factors = prime_factors(size)
            for index in reversed(range(len(factors))):
                table[f"{name}.{index}"] = (factors[index], inner)
                inner *= factors[index]
            stride *= size
        return table

    @cached_property
    def sub_axes(self) -> tuple[str, ...]:
        """The prime sub-axes of all axes, in mesh order, major first."""
        return tuple(sub for name in self.names for sub in self.split(name))

    def split(self, axis: str) -> tuple[str, ...]:
        """The prime sub-axes of an axis, major first; nothing for an axis of size 1."""
        size = self.axis_size(axis)
        if "." in axis:
            name = axis.partition(".")[0]
            return (name,) if len(prime_factors(self.axis_size(name))) == 1 else (axis,)
        count = len(prime_factors(size))
        return (axis,) if count == 1 else tuple(f"{axis}.{index}" for index in range(count))

    def axis_size(self, axis: str) -> int:
        return self._entry(axis)[0]

    def axis_stride(self, axis: str) -> int:
        """The distance in rank number of two neighbours on this axis."""
        return self._entry(axis)[1]

    def coordinate(self, rank: int, axis: str) -> int:
        size, stride = self._entry(axis)
        return rank // stride % size

    def index(self, rank: int, axes: Iterable[str]) -> int:
        """The coordinate along several axes together, the first axis major."""
        index = 0
        for axis in axes:
            index = index * self.axis_size(axis) + self.coordinate(rank, axis)
        return index

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` on these axes alone, the first axis major."""
        axes = tuple(axes)
        members = [rank - sum(self.coordinate(rank, axis) * self.axis_stride(axis) for axis in axes)]
        for axis in axes:
            size, stride = self._entry(axis)
            members = [member + k * stride for member in members for k in range(size)]
        return tuple(members)

    def _entry(self, axis: str) -> tuple[int, int]:
        try:
            return self._table[axis]
        except KeyError:
            have = ", ".join(f"{name}={size}" for name, size in self.axes) or "no axes"
            raise LayoutError(f"axis '{axis}' is not in the mesh, which has {have}") from None


def prime_factors(number: int) -> tuple[int, ...]:
    """12 -> (2, 2, 3)."""
    factors: list[int] = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    if number > 1:
        factors.append(number)
    return tuple(factors)
