"""Rebuilds a part of a choice that stays over its limit: the step of the search when trees no longer help.

The search on trees cannot move nodes that forbidden pairs tie in cycles. So nodes that hold bytes at points over the limit, and
their neighbourhood, are freed, and all others stay fixed. A dive with propagation (`large/masks.py`) chooses the free ones again,
options with the fewest bytes first. The new choice has no forbidden pair either. It is kept if less is over the limit.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from scrimp.planner.large.arrays import Arrays
from scrimp.planner.large.masks import Masks
from scrimp.planner.solver.points import Numbers

_SIZES = (30, 100, 300, 1000, 3000)  # nodes that are freed


def too_much(profile: Numbers, target: float) -> Numbers:
    """The excess by point, relative to the target."""
    return np.maximum(profile / max(target, 1.0) - 1.0, 0.0)


def rebuilt(
    arrays: Arrays, masks: Masks, choice: Numbers, costs: Numbers, over: Numbers, rng: random.Random, deadline: float
) -> Numbers | None:
    """`costs`: of each option, its bytes included; `over`: excess by point. Returns a candidate choice, or None."""
    spared = _spared(arrays, choice, over)
    hot = np.flatnonzero(spared > 0)
    if not len(hot):
        return None
    weights = spared[hot] / spared[hot].sum()
    size = rng.choice(_SIZES)
    count = min(len(hot), max(size // 8, 1))
    drawn = np.argsort(weights * np.array([rng.random() for _ in hot]), kind="stable")[::-1][:count]
    free = _around(masks, hot[drawn].tolist(), size)
    inner = masks.around(choice.tolist(), free)
    ordered = np.argsort(costs[free], axis=1, kind="stable").tolist()
    found, allowed = inner.dive(dict(zip(free, ordered, strict=True)), deadline, free)
    return np.array(found) if allowed and found is not None else None


def _spared(arrays: Arrays, choice: Numbers, over: Numbers) -> Numbers:
    """By node, how much its smallest option would save at points over the limit."""
    upto = np.concatenate([[0.0], np.cumsum(over)])
    spared = np.zeros(arrays.count)
    nodes, pairs = arrays.node_holds, arrays.pair_holds
    least = np.where(np.isfinite(arrays.unary)[nodes.owner], nodes.table, np.inf).min(axis=1)
    each = (arrays.node_bytes(choice) - least) * (upto[nodes.stop] - upto[nodes.first])
    np.add.at(spared, nodes.owner, each)
    if len(pairs.owner):
        each = (arrays.pair_bytes(choice) - pairs.table.min(axis=(1, 2))) * (upto[pairs.stop] - upto[pairs.first])
        for end in arrays.ends[pairs.owner].T:
            np.add.at(spared, end, each)
    return spared


def _around(masks: Masks, seeds: Sequence[int], size: int) -> list[int]:
    """Breadth first from these nodes: so many that are undecided."""
    seen, front = set(seeds), list(seeds)
    found: list[int] = []
    while front and len(found) < size:
        behind = []
        for i in front:
            if masks.domains[i] & (masks.domains[i] - 1):
                found.append(i)
            for j, _ in masks.arcs[i]:
                if j not in seen:
                    seen.add(j)
                    behind.append(j)
        front = behind
    return found[:size]
