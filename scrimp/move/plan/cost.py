"""Costs of a hundred thousand moves: those of `synthesize` without one synthesis each.

Where every dim divides evenly, the result of `synthesize` depends on a shape in two ways alone: the possible numbers of tiles of
a dim, which its greatest common divisor with the number of devices gives, and the number of elements. So moves with the same
layouts, divisors, elements and bytes of an element share one synthesis, with the same result.

With `exact=False` two approximations save many more syntheses:

    dims, and axes of the same size and link, are renamed     the search truncates long lists, and which end it drops depends on
                                                              the order of dims: costs differ now and then
    sizes between two known sizes are interpolated            the least of straight lines (latency + bytes / rate, one for each
                                                              program) lies above the chord between two of its points; where
                                                              a known program is within NEAR of the chord it is used

A cost is then still that of a program for this move, except for the names of dims and axes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, permutations, product
from math import gcd, inf, prod
from typing import NamedTuple

from scrimp.cluster import Cluster
from scrimp.errors import LayoutError, MoveError
from scrimp.layout import Layout, Mesh
from scrimp.move.plan.steps import step_link
from scrimp.move.plan.synthesize import synthesize
from scrimp.move.program import Program

DTYPES = {1: "int8", 2: "bfloat16", 4: "float32", 8: "float64", 16: "complex128"}  # one of each size that can be summed
NEAR = 0.01
FAR = 16  # a size above all known ones is costed at so many times its size, so that the next ones lie between two

Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class MoveCost:
    """`seconds` is infinite for an impossible move, which would have to create a partial sum."""

    seconds: float
    peak_nbytes: int
    received_nbytes: int


class MoveCosts:
    """`MoveCosts(mesh, cluster).cost((64, 2048, 4096), 2, "[x,-,-]", "[-,-,x]")`. It caches all results."""

    def __init__(self, mesh: Mesh, cluster: Cluster | None = None, *, exact: bool = True) -> None:
        self.mesh = mesh
        self.cluster = (cluster or Cluster()).on(mesh)
        self.exact = exact
        self.syntheses = 0
        self._renamings = [{name: name for name in mesh.names}] if exact else list(_renamings(mesh, self.cluster))
        self._far = next(number for number in count(FAR) if gcd(number, mesh.size) == 1)  # keeps every dim's divisor
        self._divisors: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}
        self._patterns: dict[tuple[Layout, Layout, tuple[int, ...]], _Pattern] = {}
        self._curves: dict[Key, _Curve] = {}
        self._uneven: dict[Key, MoveCost] = {}

    def cost(self, shape: Sequence[int], itemsize: int, src: Layout | str, dst: Layout | str) -> MoveCost:
        src, dst, shape = Layout.parse(src), Layout.parse(dst), tuple(shape)
        known = self._divisors.get(shape)
        if known is None:
            known = self._divisors[shape] = tuple(gcd(size, self.mesh.size) for size in shape), prod(shape)
        divisors, numel = known
        pattern = self._patterns.get((src, dst, divisors))
        if pattern is None:
            pattern = self._patterns[src, dst, divisors] = self._pattern(shape, divisors, src, dst)
        if not pattern.even or not numel:
            return self._one(shape, itemsize, src, dst, possible=pattern.possible)
        peak = numel // pattern.fewest_tiles * itemsize
        if not pattern.possible:
            return MoveCost(seconds=inf, peak_nbytes=peak, received_nbytes=0)
        seconds, received = (0.0, 0) if pattern.silent else self._at(pattern, shape, numel, itemsize)
        return MoveCost(seconds=seconds, peak_nbytes=peak, received_nbytes=received)

    def _one(self, shape: tuple[int, ...], itemsize: int, src: Layout, dst: Layout, *, possible: bool) -> MoveCost:
        """A move with uneven tiles: one synthesis."""
        key = (shape, itemsize, src, dst)
        known = self._uneven.get(key)
        if known is None:
            if possible:
                program = self._synthesize(shape, itemsize, src, dst)
                seconds, peak, received = program.seconds, program.peak_numel, program.received_nbytes
            else:
                peak = max(layout.local_numel(shape, self.mesh) for layout in (src, dst))
                seconds, received = inf, 0
            known = MoveCost(seconds=seconds, peak_nbytes=peak * itemsize, received_nbytes=received)
            self._uneven[key] = known
        return known

    def _pattern(self, shape: tuple[int, ...], divisors: tuple[int, ...], src: Layout, dst: Layout) -> _Pattern:
        for layout in (src, dst):
            layout.validate(self.mesh, shape)
        if src.factors != dst.factors:
            raise LayoutError(f"source {src} and target {dst} factor the dims differently; move on one factored shape")
        held, wanted = src.split(self.mesh), dst.split(self.mesh)
        refined = all(want[: len(have)] == have for have, want in zip(held.dims, wanted.dims, strict=True))
        counts = [layout.counts(self.mesh) for layout in (src, dst)]
        even = all(divisor % n == 0 for layout in counts for divisor, n in zip(divisors, layout, strict=True))
        order, start, end = self._canonical(divisors, src, dst)
        key = (start, end, tuple(divisors[dim] for dim in order))
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = _Curve(src=start, dst=end)
        return _Pattern(
            possible={*wanted.partial} <= {*held.partial},
            even=even,
            silent=refined and wanted.partial == held.partial,
            fewest_tiles=min(map(prod, counts)),
            order=order,
            curve=curve,
        )

    def _canonical(self, divisors: tuple[int, ...], src: Layout, dst: Layout) -> tuple[tuple[int, ...], Layout, Layout]:
        """The order of dims, and both layouts with dims in that order and axes renamed: the smallest of all such forms. Factors
        count as dims here."""
        if self.exact:
            return tuple(range(len(divisors))), src, dst
        ways = []
        for names in self._renamings:
            rows = []
            for dim, divisor in enumerate(divisors):
                rows.append((_renamed(src.dims[dim], names), _renamed(dst.dims[dim], names), divisor, dim))
            sums = tuple(tuple(sorted(_renamed(layout.partial, names))) for layout in (src, dst))
            rows.sort()
            ways.append(([row[:3] for row in rows], sums, [row[3] for row in rows]))
        best, (had, kept), order = min(ways)
        start = Layout(dims=tuple(row[0] for row in best), partial=had)
        end = Layout(dims=tuple(row[1] for row in best), partial=kept)
        return tuple(order), start, end

    def _at(self, pattern: _Pattern, shape: tuple[int, ...], numel: int, itemsize: int) -> tuple[float, int]:
        """Seconds and bytes received."""
        curve, nbytes = pattern.curve, numel * itemsize
        known = curve.known.get((numel, itemsize))
        if known is None:
            shape = tuple(shape[dim] for dim in pattern.order)
            line = None if self.exact else self._line(curve, shape, nbytes, itemsize)
            if line is None:
                program = self._sample(curve, shape, itemsize)
                known = program.seconds, program.received_nbytes
            else:
                known = line.seconds(nbytes), round(line.received * nbytes)
            curve.known[numel, itemsize] = known
        return known

    def _line(self, curve: _Curve, shape: tuple[int, ...], nbytes: int, itemsize: int) -> _Line | None:
        line = curve.near(nbytes)
        if line is None and shape and curve.samples and nbytes > curve.samples[-1][0]:
            self._sample(curve, (shape[0] * self._far, *shape[1:]), itemsize)
            line = curve.near(nbytes)
        return line

    def _sample(self, curve: _Curve, shape: tuple[int, ...], itemsize: int) -> Program:
        program = self._synthesize(shape, itemsize, curve.src, curve.dst)
        insort(curve.samples, (prod(shape) * itemsize, _line(program, self.cluster)))
        return program

    def _synthesize(self, shape: tuple[int, ...], itemsize: int, src: Layout, dst: Layout) -> Program:
        if itemsize not in DTYPES:
            raise MoveError(f"elements of {itemsize!r} bytes: an element has one of {', '.join(map(str, DTYPES))}")
        self.syntheses += 1
        return synthesize(shape, self.mesh, src, dst, dtype=DTYPES[itemsize], cluster=self.cluster)


class _Line(NamedTuple):
    """A program's cost for arrays of any size: a time for its messages, and per byte of the array a time and the bytes received
    by the busiest device."""

    fixed: float
    pace: float
    received: float

    def seconds(self, nbytes: int) -> float:
        return self.fixed + self.pace * nbytes


def _line(program: Program, cluster: Cluster) -> _Line:
    links = [(step, step_link(step, cluster)) for step in program.steps if step.messages]
    itemsize, nbytes = program.itemsize, prod(program.shape) * program.itemsize
    return _Line(
        fixed=sum(step.messages * link.latency_seconds for step, link in links),
        pace=sum(step.received_numel * itemsize / link.bytes_per_second for step, link in links) / nbytes,
        received=program.received_nbytes / nbytes,
    )


@dataclass(kw_only=True)
class _Curve:
    """The known costs of one move over all sizes: costs by elements and bytes of one, and programs by bytes."""

    src: Layout
    dst: Layout
    known: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    samples: list[tuple[int, _Line]] = field(default_factory=list)

    def near(self, nbytes: int) -> _Line | None:
        """The program to use for this size, if the sizes below and above it agree."""
        above = bisect_left(self.samples, nbytes, key=lambda sample: sample[0])
        if above < len(self.samples) and self.samples[above][0] == nbytes:
            return self.samples[above][1]
        if above in (0, len(self.samples)):
            return None
        (low, first), (high, second) = self.samples[above - 1 : above + 1]
        share = (nbytes - low) / (high - low)
        chord = (1 - share) * first.seconds(low) + share * second.seconds(high)
        best = min(first, second, key=lambda line: line.seconds(nbytes))
        return best if best.seconds(nbytes) <= (1 + NEAR) * chord else None


@dataclass(frozen=True, kw_only=True)
class _Pattern:
    """Two layouts for shapes with the same divisors. `order`: the dims of the curve's layouts, as dims of these. `silent`: every
    device already holds its target tile."""

    possible: bool
    even: bool
    silent: bool
    fewest_tiles: int
    order: tuple[int, ...]
    curve: _Curve


def _renamings(mesh: Mesh, cluster: Cluster) -> Iterator[dict[str, str]]:
    """Every permutation of the names of axes with the same size and link."""
    alike: dict[object, list[str]] = {}
    for name, size in mesh.axes:
        alike.setdefault((size, cluster.link([name])), []).append(name)
    for orders in product(*(permutations(names) for names in alike.values())):
        yield {
            old: new for names, order in zip(alike.values(), orders, strict=True) for old, new in zip(names, order, strict=True)
        }


def _renamed(axes: tuple[str, ...], names: dict[str, str]) -> tuple[str, ...]:
    """Sub-axes follow their axis."""
    parts = (axis.partition(".") for axis in axes)
    return tuple(names[whole] + dot + sub for whole, dot, sub in parts)
