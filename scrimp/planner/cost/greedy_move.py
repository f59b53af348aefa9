"""An upper bound of a resharding's cost, in microseconds of planning: a greedy sequence of collectives.

`synthesize` finds the cheapest program of a resharding, in milliseconds; a planner needs the cost of a hundred thousand, few of
which are chosen. So it uses this one, which always can be run, and which is the cheapest for most reshardings of known
parallelisms. Axes leave a dim from its minor end and join it there. As long as that is possible

    a replicated axis joins by a slice, which costs nothing; a partial one by a reduce-scatter
    axes at the end of one dim that are wanted next in another move there by an all-to-all
    partial axes that split nothing afterwards are all-reduced while tiles are small

and where it is not, the axis at the end of a dim that must leave it is all-gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from scrimp.cluster import Cluster, Link
from scrimp.layout import Layout, Mesh, prime_factors


class AxisWise:
    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        self.mesh, self._sizes, self._cluster = mesh, dict(mesh.axes), cluster
        self._links: dict[tuple[str, ...], Link] = {}
        self._rounds = {name: sum(prime - 1 for prime in prime_factors(size)) for name, size in mesh.axes}

    def seconds(self, nbytes: float, src: Layout, dst: Layout) -> float:
        """`nbytes`: of the whole array."""
        return self.cost(nbytes, src, dst)[0]

    def cost(self, nbytes: float, src: Layout, dst: Layout, shape: Sequence[int] = ()) -> tuple[float, float, float]:
        """Seconds, and with a shape also the bytes that a device needs besides the array before and after: parts that are packed,
        parts that arrive, and arrays between two collectives. Then the same if the source is donated: it is freed once its parts
        are packed."""
        state, wanted = [[*dim] for dim in src.dims], [[*dim] for dim in dst.dims]
        summed = {*src.partial}
        local, total = nbytes / prod(self._sizes[axis] for dim in state for axis in dim), 0.0
        end = nbytes / prod(self._sizes[axis] for dim in wanted for axis in dim)
        held, most = 0.0, 0.0  # of the array between, and the most beyond the source
        start, packed = local, False  # whether the first collective packs all of the source

        def inner(dim: int) -> bool:
            """Whether a part along the dim is scattered in memory."""
            return any(shape[k] > prod(self._sizes[axis] for axis in state[k]) for k in range(dim)) if shape else False

        while state != wanted or summed:
            comes = self._coming(state, wanted)
            if comes is not None:
                axis, dim = comes
                if axis in summed:
                    total += self._reduced((axis,), local)
                    summed.remove(axis)
                    packed = packed or (not held and inner(dim))
                    most = max(most, held + local * (2 if inner(dim) else 1) + local / self._sizes[axis])
                state[dim].append(axis)
                local /= self._sizes[axis]
                held = local
                continue
            goes = _going(state, wanted)
            if goes is not None:
                source, target, count = goes
                axes = tuple(state[source][-count:])
                size = prod(self._sizes[axis] for axis in axes)
                total += self._link(axes).seconds(size - 1, local * (size - 1) / size)
                packed = packed or not held
                most, held = max(most, held + 2 * local), local
                del state[source][-count:]
                state[target] += axes
                continue
            alone = tuple(sorted(axis for axis in summed if not any(axis in dim for dim in wanted)))
            if alone:
                total += 2 * self._reduced(alone, local)
                most, held = max(most, held + 2 * local), local
                summed -= {*alone}
                continue
            dim = next(k for k, (now, then) in enumerate(zip(state, wanted, strict=True)) if now != then[: len(now)])
            axis = state[dim].pop()
            local *= self._sizes[axis]
            packed = packed or (not held and inner(dim))
            most, held = max(most, held + local * (2 if inner(dim) else 1)), local
            total += self._reduced((axis,), local)  # an all-gather costs as much as a reduce-scatter
        return total, max(0.0, most - end), max(0.0, most - end - (start if packed else 0.0))

    def _coming(self, state: list[list[str]], wanted: list[list[str]]) -> tuple[str, int] | None:
        """An axis that a dim needs next, and that splits nothing now."""
        split = {axis for dim in state for axis in dim}
        for dim, (now, then) in enumerate(zip(state, wanted, strict=True)):
            if len(now) < len(then) and now == then[: len(now)] and then[len(now)] not in split:
                return then[len(now)], dim
        return None

    def _reduced(self, axes: tuple[str, ...], local: float) -> float:
        size = prod(self._sizes[axis] for axis in axes)
        rounds = sum(self._rounds[axis] for axis in axes)
        return self._link(axes).seconds(rounds, local * (size - 1) / size) if size > 1 else 0.0

    def _link(self, axes: tuple[str, ...]) -> Link:
        if axes not in self._links:
            self._links[axes] = self._cluster.link(axes)
        return self._links[axes]


def _going(state: list[list[str]], wanted: list[list[str]]) -> tuple[int, int, int] | None:
    """Two dims, and how many axes at the end of the one are needed next in the other, in that order."""
    for target, (now, then) in enumerate(zip(state, wanted, strict=True)):
        if now != then[: len(now)]:
            continue
        rest = then[len(now) :]
        for source, other in enumerate(state):
            kept = _agreeing(other, wanted[source])
            for count in range(min(len(rest), len(other) - kept), 0, -1):
                if source != target and other[-count:] == rest[:count]:
                    return source, target, count
    return None


def _agreeing(one: list[str], other: list[str]) -> int:
    """The length of the common prefix."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count
