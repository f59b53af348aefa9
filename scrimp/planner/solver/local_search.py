"""Local search: improves a choice by changing one node, or both ends of a link, to the best options while all others stay fixed.

It takes a step if it lowers (forbidden pairs, bytes over the limits summed over points, the objective), in lexicographic order.
The result is a local optimum without a proof; bounds come from the linear program. It is deterministic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from scrimp.planner.solver.model import HELD, PEAK
from scrimp.planner.solver.points import Numbers
from scrimp.planner.solver.presolve import Costs, Reduced

_PAIRS = 64  # tries only the most promising pairs of a link
_SWEEPS = 50
WORK = 2 * 10**8  # work limit, in bytes at a point evaluated for an option: seconds on most machines, and the same result on all


def improve(
    reduced: Reduced, choice: Sequence[int], objective: str, limit: float, held_limit: float, deadline: float, work: int = WORK,
    least: float = -math.inf,
) -> tuple[int, ...]:  # fmt: skip
    """Improves `choice` within a peak and a sum of held bytes, if that is feasible. `least`: stop at this peak."""
    if not reduced.nodes:
        return ()
    state = _State(reduced, choice, objective, limit, held_limit)
    singles: list[tuple[int, ...]] = [(i,) for i in range(len(reduced.nodes))]
    pairs: list[tuple[int, ...]] = [link.nodes for link in reduced.links]
    for _ in range(_SWEEPS):
        better = False
        for moves in (singles, pairs):
            if better:
                break  # continue with single steps as long as they improve
            for nodes in moves:
                better |= state.step(nodes)
                if state.work > work or time.monotonic() > deadline or (better and state.profile.max() <= least):
                    return tuple(state.choice)
        if not better:
            break
    return tuple(state.choice)


def turn_work(reduced: Reduced) -> int:
    """Approximate work of visiting every node and every link once."""
    return len(reduced.floor) * (sum(len(costs.seconds) for costs in reduced.nodes) + _PAIRS * len(reduced.links))


class _State:
    def __init__(self, reduced: Reduced, choice: Sequence[int], objective: str, limit: float, held_limit: float) -> None:
        self.reduced, self.choice, self.objective = reduced, list(choice), objective
        self.limit, self.held_limit, self.work = limit, held_limit, 0
        self.around: list[list[int]] = [[] for _ in reduced.nodes]
        for k, link in enumerate(reduced.links):
            for i in link.nodes:
                self.around[i].append(k)
        self.profile = reduced.profile(choice)
        self.held = reduced.held + sum(int(costs.held[at]) for costs, at in reduced.picked(choice))

    def step(self, nodes: tuple[int, ...]) -> bool:
        """Sets these nodes to their best options; returns whether they changed."""
        sizes = [len(self.reduced.nodes[i].seconds) for i in nodes]
        options = np.stack([grid.ravel() for grid in np.meshgrid(*(np.arange(size) for size in sizes), indexing="ij")])
        now = np.array([self.choice[i] for i in nodes])
        here = int(np.ravel_multi_index(tuple(now), sizes))
        parts = self._parts(nodes, options)
        seconds = sum(costs.seconds[at] for costs, at in parts)
        if len(nodes) > 1:
            tried = np.append(self._promising(parts, seconds), here)
            parts = [(costs, tuple(side[tried] for side in at) if isinstance(at, tuple) else at[tried]) for costs, at in parts]
            options, seconds, here = options[:, tried], seconds[tried], len(tried) - 1
        held = self.held + sum(costs.held[at] - costs.held[at][here] for costs, at in parts)
        profiles = np.repeat(self.profile[:, None], options.shape[1], axis=1)
        self.work += profiles.size
        for costs, at in parts:
            for first, last, table in costs.spans:
                profiles[first : last + 1] += table[at] - table[at][here]
        peaks = profiles.max(axis=0)
        over = np.maximum(profiles - self.limit, 0).sum(axis=0) + np.maximum(held - self.held_limit, 0)
        forbidden = sum(np.isinf(costs.seconds[at]).astype(int) for costs, at in parts)
        finite: Numbers = sum(np.where(np.isinf(costs.seconds[at]), 0, costs.seconds[at]) for costs, at in parts)  # type: ignore[assignment]
        first_key = {PEAK: peaks, HELD: held}.get(self.objective, finite)
        # The last key prefers the current options: a step without improvement is not taken.
        keys = (np.arange(options.shape[1]) != here, finite, first_key, over, forbidden)
        best = int(np.lexsort(keys)[0])
        if best == here or all(key[best] == key[here] for key in keys[1:]):
            return False
        for i, p in zip(nodes, options[:, best], strict=True):
            self.choice[i] = int(p)
        self.profile, self.held = profiles[:, best].copy(), int(held[best])
        return True

    def _parts(self, nodes: tuple[int, ...], options: Numbers) -> list[tuple[Costs, Any]]:
        """All costs that depend on these nodes, and the index of each combination of options in their tables."""
        chosen = dict(zip(nodes, options, strict=True))
        parts: list[tuple[Costs, Any]] = [(self.reduced.nodes[i], chosen[i]) for i in nodes]
        for k in sorted({k for i in nodes for k in self.around[i]}):
            link = self.reduced.links[k]
            at = [link.classes[side][chosen.get(i, self.choice[i])] for side, i in enumerate(link.nodes)]
            parts.append((link.costs, tuple(np.broadcast_to(side, options.shape[1]) for side in at)))
        return parts

    def _promising(self, parts: list[tuple[Costs, Any]], seconds: Numbers) -> Numbers:
        """The best pairs by bytes at the worst point, or by seconds."""
        score = seconds
        if self.objective == HELD:
            score = sum(costs.held[at] for costs, at in parts)
        elif self.objective == PEAK or self.profile.max() > self.limit:
            worst = int(self.profile.argmax())
            score = np.zeros(len(seconds))
            for costs, at in parts:
                for first, last, table in costs.spans:
                    if first <= worst <= last:
                        score = score + table[at]
        order = np.lexsort((seconds, score, np.isinf(seconds)))
        return order[:_PAIRS]
