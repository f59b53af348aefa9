"""Improves a choice of a large problem: trees take their best options (`large/forest.py`) at prices for bytes.

It minimises

    seconds  +  price of a held byte x all held bytes  +  sum over points of a penalty

The penalty of a point keeps a choice within the limit (a logarithmic barrier, lowered as the search goes on), or, if a choice is
over a target, drives it there (the square of the excess). Its slope is the price of a byte at that point. The best options of all
trees at these prices are computed at once. Then they are applied one tree after another, each only if the true penalty improves
too. So a choice within the limit stays within it.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from scrimp.planner.large.arrays import Arrays, Holds
from scrimp.planner.large.forest import Forest, Neighbours, best_on
from scrimp.planner.solver.points import Numbers

_FORESTS = 24  # forests that are kept and reused
# Most nodes of a tree. Large trees are faster; small ones are used where a large one would exceed a limit somewhere.
QUICK, FINE = (40, 300, 2000), (4, 12, 40)
_DEPTH = 60
_LONG = 2  # a span of more than 1/2 of all points is long
_ROOM = 1e-6  # of a limit: closer to it the logarithm's price would be infinite
_STEEPEST = 50.0


class Penalty:
    """The cost of the bytes at a point, in seconds. With `steep`: weight exp(steep (bytes / target - 1)), which grows fast near
    the target and is finite beyond it. Without: the negative logarithm of the free bytes, times weight. `held_price`: of a byte
    wherever it is held; `held_limit`: of all held bytes."""

    def __init__(
        self, target: float, *, weight: float, steep: float = 0.0, held_price: float = 0.0, held_limit: float = math.inf
    ) -> None:
        self.target, self.weight, self.steep = target, weight, steep
        self.held_price, self.held_limit = held_price, held_limit
        self.unit = max(target, 1.0)
        self.room = target + _ROOM * self.unit

    def prices(self, profile: Numbers) -> Numbers:
        """Seconds per additional byte."""
        if self.target == math.inf:
            return np.zeros(len(profile))
        if self.steep:
            return self.weight * self.steep / self.unit * self._exp(profile)
        return self.weight / (self.room - profile)

    def change(self, before: Numbers, after: Numbers) -> float:
        """Infinite if a choice within the limit would leave it."""
        if self.target == math.inf or not len(after):
            return 0.0
        if self.steep:
            return self.weight * float((self._exp(after) - self._exp(before)).sum())
        if after.max() > self.target:
            return math.inf
        return self.weight * float(np.log((self.room - before) / (self.room - after)).sum())

    def _exp(self, profile: Numbers) -> Numbers:
        return np.exp(np.minimum(self.steep * (profile / self.unit - 1), _STEEPEST))


class Descent:
    """`choice`, with its `seconds`, its bytes by point (`profile`) and all it holds (`held`)."""

    def __init__(self, arrays: Arrays, choice: Numbers, seed: int = 0) -> None:
        self.arrays, self.rng = arrays, random.Random(seed)
        self.neighbours = Neighbours(arrays)
        self.free = (np.isfinite(arrays.unary).sum(axis=1) > 1).tolist()
        self.forests: deque[Forest] = deque(maxlen=_FORESTS)
        self.drawn = 0
        self.sizes: tuple[int, ...] = QUICK
        # Pairs that hold bytes have a price too; all other tables stay as they are.
        self.priced = arrays.pair.copy() if len(arrays.pair_holds.owners) else arrays.pair
        self.peak = 0.0  # of the profile, or an upper bound
        self.restart(choice)

    def restart(self, choice: Numbers) -> None:
        self.choice = choice.copy()
        self.profile, self.held = self.arrays.profile(choice), self.arrays.held(choice)
        self.seconds = self.count_seconds()

    def count_seconds(self) -> float:
        a, x = self.arrays, self.choice
        pairs = a.pair[np.arange(len(a.ends)), x[a.ends[:, 0]], x[a.ends[:, 1]]]
        return float(a.unary[np.arange(a.count), x].sum()) + float(pairs.sum(dtype=float))

    def forbidden(self) -> int:
        a, x = self.arrays, self.choice
        return int(np.isinf(a.pair[np.arange(len(a.ends)), x[a.ends[:, 0]], x[a.ends[:, 1]]]).sum())

    def forest(self) -> Forest:
        """A new forest every second time while they are few; later now and then."""
        self.drawn += 1
        if len(self.forests) < 2 or self.drawn % (2 if len(self.forests) < _FORESTS else 4) == 0:
            self.forests.append(self.neighbours.forest(self.rng, self.free, self.rng.choice(self.sizes), _DEPTH))
            return self.forests[-1]
        return self.forests[self.rng.randrange(len(self.forests))]

    def be(self, sizes: tuple[int, ...]) -> None:
        """Sets the tree sizes: QUICK or FINE."""
        if sizes != self.sizes:
            self.sizes = sizes
            self.forests.clear()

    def mend(self, most: float) -> int:
        """One sweep against forbidden pairs, each of which costs `most` seconds. Returns how many are left."""
        self.restart(best_on(self.forest(), self.arrays.unary, self.arrays.pair, self.choice, most))
        return self.forbidden()

    def sweep(self, penalty: Penalty, deadline: float = math.inf) -> float:
        """One sweep over a forest; returns the decrease of the objective."""
        forest = self.forest()
        self.peak = float(self.profile.max())
        prices = penalty.prices(self.profile)
        found = best_on(forest, self.price(prices, penalty.held_price), self.priced, self.choice, np.inf)
        return self._take(forest, found, penalty, prices, deadline)

    def price(self, prices: Numbers, held_price: float) -> Numbers:
        """Seconds of options plus their bytes at these prices; those of pairs go to `priced`."""
        a = self.arrays
        upto = np.concatenate([[0.0], np.cumsum(prices)])
        unary = a.unary.copy()
        for holds, target, base in ((a.node_holds, unary, a.unary), (a.pair_holds, self.priced, a.pair)):
            if len(holds.owners):
                each = (upto[holds.stop] - upto[holds.first] + held_price).reshape(-1, *(1,) * (holds.table.ndim - 1))
                target[holds.owners] = base[holds.owners] + np.add.reduceat(holds.table * each, holds.begins, axis=0)
        return unary

    def _take(self, forest: Forest, found: Numbers, penalty: Penalty, prices: Numbers, deadline: float) -> float:
        a, count = self.arrays, int(forest.tree.max(initial=-1)) + 1
        moved = np.flatnonzero(found != self.choice)
        if not len(moved):
            return 0.0
        seconds = np.bincount(forest.tree[moved], a.unary[moved, found[moved]] - a.unary[moved, self.choice[moved]], count)
        of_edge = forest.tree[a.ends].max(axis=1)  # an edge belongs to one tree, or to none
        changed = (found != self.choice)[a.ends].any(axis=1)
        edges = np.flatnonzero(changed)
        (one, two), tree = a.ends[edges].T, of_edge[edges]
        cost = a.pair[edges, found[one], found[two]].astype(float) - a.pair[edges, self.choice[one], self.choice[two]]
        seconds += np.bincount(tree, cost, count)
        spans = self._spans(forest, found, of_edge)
        tree_of = spans[0]
        begins, ends = np.searchsorted(tree_of, np.arange(count)), np.searchsorted(tree_of, np.arange(count), "right")
        upto = np.concatenate([[0.0], np.cumsum(prices)])
        linear = seconds + np.bincount(tree_of, spans[3] * (upto[spans[2]] - upto[spans[1]] + penalty.held_price), count)
        taken = np.zeros(count, bool)
        won = 0.0
        active = np.unique(forest.tree[moved])
        active = active[linear[active] < -1e-12]
        for n, k in enumerate(active[np.argsort(linear[active], kind="stable")].tolist()):
            if n % 64 == 63 and time.monotonic() > deadline:
                break
            change = self._try(float(seconds[k]), [each[begins[k] : ends[k]] for each in spans[1:]], penalty, upto)
            if change < 0:
                taken[k], won = True, won - change
        accepted = (forest.tree >= 0) & taken[forest.tree]
        self.choice = np.where(accepted, found, self.choice)
        self.seconds, self.profile = self.count_seconds(), a.profile(self.choice)
        return won

    def _spans(self, forest: Forest, found: Numbers, of_edge: Numbers) -> tuple[Numbers, ...]:
        """Holds whose bytes would change: tree, first point, end, by how many bytes; by tree."""
        a, parts = self.arrays, []
        now, then = a.node_bytes(self.choice), a.node_bytes(found)
        parts.append(_changed(a.node_holds, then - now, forest.tree))
        if len(a.pair_holds.owners):
            parts.append(_changed(a.pair_holds, a.pair_bytes(found) - a.pair_bytes(self.choice), of_edge))
        joined = [np.concatenate(each) for each in zip(*parts, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        return tuple(each[order] for each in joined)

    def _try(self, seconds: float, spans: Sequence[Numbers], penalty: Penalty, upto: Numbers) -> float:
        """Applies a tree's change if that is an improvement; returns the change of the objective."""
        first, stop, nbytes = spans
        if not len(nbytes):
            return seconds
        held = float(nbytes.sum())
        if held > 0 and self.held + held > penalty.held_limit:
            return math.inf
        change = seconds + penalty.held_price * held
        if penalty.target == math.inf:
            if change < 0:
                self.held += held
            return change
        profile, most = self.profile, len(self.profile)
        long = (stop - first) * _LONG > most
        if long.any() and not long.all():
            # Long holds change little, nearly everywhere: use the current prices.
            far = float(nbytes[long].sum())
            change += float((nbytes[long] * (upto[stop[long]] - upto[first[long]])).sum())
            if far > 0 and self.peak + far > penalty.target:
                return math.inf
        else:
            long = np.zeros(len(long), bool)
        low, high = int(first[~long].min()), int(stop[~long].max())
        ends = np.bincount(first[~long] - low, nbytes[~long], high - low + 1)
        ends -= np.bincount(stop[~long] - low, nbytes[~long], high - low + 1)
        before = profile[low:high]
        after = before + np.cumsum(ends[:-1])
        add = [(int(b), int(e), float(n)) for b, e, n in zip(first[long], stop[long], nbytes[long], strict=True)]
        shift = np.zeros(high - low)
        for b, e, n in add:
            shift[max(b - low, 0) : max(e - low, 0)] += n
        if add and not penalty.steep and (after + shift).max() > penalty.target:
            return math.inf
        change += penalty.change(before, after)
        if change >= 0:
            return change
        profile[low:high] = after
        for b, e, n in add:
            profile[b:e] += n
        self.held += held
        self.peak = max(float(profile[low:high].max()), self.peak + sum(n for _, _, n in add if n > 0))
        return change


def _changed(holds: Holds, change: Numbers, tree: Numbers) -> tuple[Numbers, ...]:
    some = np.flatnonzero(change)
    return tree[holds.owner[some]], holds.first[some], holds.stop[some], change[some]
