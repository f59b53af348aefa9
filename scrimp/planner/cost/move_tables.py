"""Tables of resharding costs between placements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from scrimp.planner.cost.greedy_move import AxisWise
from scrimp.planner.formulation.builder import Numbers
from scrimp.planner.shard.placement import Placed, between, common

Places = tuple[Placed, ...]
Order = tuple[int, ...]


class Moves:
    """The costs on one mesh and cluster, with a cache."""

    def __init__(self, costs: AxisWise) -> None:
        self.costs, self.mesh = costs, costs.mesh
        self.sizes = dict(costs.mesh.axes)
        self._seconds: dict[tuple[Placed, Placed, int], float] = {}
        self._tables: dict[tuple[Places, Places, int, Order, bool, bool], tuple[Numbers, Numbers, Numbers]] = {}

    def tables(
        self,
        made: Sequence[Placed],
        needed: Sequence[Placed],
        itemsize: int,
        order: Order = (),
        *,
        donated: bool = False,
        given: bool = False,
    ) -> tuple[Numbers, Numbers, Numbers]:
        """By pairs: seconds of resharding, bytes of the copies, and bytes that the resharding takes besides while it runs, which
        depend on the order of the dims in memory, and on whether the source is freed. `given`: the source comes from another
        layer, which may hold its storage too: a partial sum is not reduced in place. Few pairs differ, and identical layers share
        them."""
        rows, columns = ({place: k for k, place in enumerate(dict.fromkeys(places))} for places in (made, needed))
        key = (*rows,), (*columns,), itemsize, order, donated, given
        if key not in self._tables:
            seconds = [[self.seconds(one, other, itemsize) for other in columns] for one in rows]
            nbytes = [[self.nbytes(one, other, itemsize) for other in columns] for one in rows]
            staging = [
                [
                    self.staging(one.permuted(order), other.permuted(order), itemsize, donated=donated)
                    + (other.numel(self.sizes) * itemsize if given and one != other == one.complete() else 0)
                    for other in columns
                ]
                for one in rows
            ]
            self._tables[key] = np.array(seconds, float), np.array(nbytes, np.int64), np.array(staging, np.int64)
        pairs = np.ix_([rows[place] for place in made], [columns[place] for place in needed])
        found = self._tables[key]
        return found[0][pairs], found[1][pairs], found[2][pairs]

    def seconds(self, source: Placed, target: Placed, itemsize: int) -> float:
        if source == target:
            return 0.0
        key = (source, target, itemsize)
        if key not in self._seconds:
            self._seconds[key] = self._allowed(source, target, itemsize)
        return self._seconds[key]

    def nbytes(self, source: Placed, target: Placed, itemsize: int) -> int:
        """Additional bytes of the target while the source is held; a partial sum is reduced in place."""
        if source == target or source.complete() == target:
            return 0
        if common(source, target, self.mesh) is None:
            return max(target.numel(self.sizes), between(source, target, self.mesh).numel(self.sizes)) * itemsize
        return target.numel(self.sizes) * itemsize

    def staging(self, source: Placed, target: Placed, itemsize: int, *, donated: bool = False) -> int:
        """Bytes besides source and target while a tensor is resharded."""
        if source == target:
            return 0
        found = common(source, target, self.mesh)
        if found is None:
            middle = between(source, target, self.mesh)
            hops = self.staging(source, middle, itemsize, donated=donated), self.staging(middle, target, itemsize, donated=True)
            return max(hops) + min(middle.numel(self.sizes), target.numel(self.sizes)) * itemsize
        shape, src, dst = found
        return round(self.costs.cost(prod(shape) * itemsize, src, dst, shape)[2 if donated else 1])

    def _allowed(self, source: Placed, target: Placed, itemsize: int) -> float:
        found = common(source, target, self.mesh)
        if found is None:
            middle = between(source, target, self.mesh)
            return self.seconds(source, middle, itemsize) + self.seconds(middle, target, itemsize)
        shape, src, dst = found
        return self.costs.seconds(prod(shape) * itemsize, src, dst)
