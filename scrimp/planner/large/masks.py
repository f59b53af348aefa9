"""Feasible options as bit masks: propagation over forbidden pairs, and a first feasible choice.

A node's domain is an integer, bit p for option p. An edge is a table of masks: by option of one end, the options of the other
that it allows. Few tables differ, and the results of each are cached: a step of propagation is one lookup in a dict.

    propagate   an option that no remaining option at the other end of an edge allows is removed, and so on (arc consistency)
    dive        nodes in breadth-first order take the most promising remaining option, and the rest is propagated; where a node
                has no option left, the last decision is undone and its option removed
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from scrimp.planner.solver.points import Numbers

_FAILS = 20_000  # of the dive, in all
_PATIENCE = 12  # fails near one place, before more than the last decision is undone


class Support(dict[int, int]):
    """By domain of one end: the options allowed at the other."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__()
        self.rows = rows

    def __missing__(self, domain: int) -> int:
        allowed, rest = 0, domain
        while rest:
            low = rest & -rest
            allowed |= self.rows[low.bit_length() - 1]
            rest ^= low
        self[domain] = allowed
        return allowed


class Masks:
    """`options`: by node, which it may take; `ends`: of each edge its nodes; `allowed`: by edge, which pairs; padded."""

    def __init__(self, options: Numbers, ends: Numbers, allowed: Numbers) -> None:
        self.domains: list[int] = _bits(options)
        self.arcs: list[list[tuple[int, Support]]] = [[] for _ in self.domains]
        seen: dict[bytes, tuple[Support, Support]] = {}
        packed = np.packbits(allowed.reshape(len(allowed), -1), axis=1) if len(allowed) else np.zeros((0, 1), np.uint8)
        for k, (one, two) in enumerate(ends.tolist()):
            key = packed[k].tobytes()
            both = seen.get(key)
            if both is None:
                both = seen[key] = Support(_bits(allowed[k])), Support(_bits(allowed[k].T))
            self.arcs[one].append((two, both[0]))
            self.arcs[two].append((one, both[1]))

    def copy(self) -> Masks:
        """With the same edges, for a dive, which leaves one option of every node."""
        copied = Masks.__new__(Masks)
        copied.arcs, copied.domains = self.arcs, self.domains.copy()
        return copied

    def around(self, choice: Sequence[int], free: Sequence[int]) -> Masks:
        """With the same edges: these nodes keep their domains, all others are fixed as in `choice`, which is allowed."""
        inner = self.copy()
        inner.domains = [1 << p for p in choice]
        for i in free:
            inner.domains[i] = self.domains[i]
        inside = set(free)
        inner.propagate({j for i in free for j, _ in self.arcs[i] if j not in inside})
        return inner

    def propagate(self, changed: Iterable[int], trail: list[tuple[int, int]] | None = None) -> int | None:
        """Propagates from changed nodes. Returns the node without options left, or None. `trail`: collects (node, domain
        before)."""
        domains, arcs, todo = self.domains, self.arcs, list(changed)
        while todo:
            i = todo.pop()
            mine = domains[i]
            for j, support in arcs[i]:
                theirs = domains[j]
                left = theirs & support[mine]
                if left != theirs:
                    if trail is not None:
                        trail.append((j, theirs))
                    domains[j] = left
                    if not left:
                        return j
                    todo.append(j)
        return None

    def left(self, width: int) -> Numbers:
        """The remaining options, by node and option."""
        if width > 63:
            return np.array([[each >> p & 1 for p in range(width)] for each in self.domains], bool)
        return (np.array(self.domains, np.uint64)[:, None] >> np.arange(width, dtype=np.uint64) & np.uint64(1)).astype(bool)

    def dive(
        self,
        preferred: Mapping[int, Sequence[int]] | Sequence[Sequence[int]],
        deadline: float,
        order: Sequence[int] | None = None,
    ) -> tuple[list[int] | None, bool]:
        """`preferred`: each node's options, the best first; `order`: the undecided nodes. Returns a choice, and whether it is
        without forbidden pairs: if none was found in time, open nodes get any option. None if it is proven that there is none."""
        domains, rng, order = self.domains, random.Random(0), self._walk() if order is None else order
        decisions: list[tuple[int, int, int, int]] = []  # position in the order, node, option, length of the trail before
        trail: list[tuple[int, int]] = []
        place, furthest, fails, near, jump = 0, 0, 0, 0, 1
        while place < len(order):
            i = order[place]
            mine = domains[i]
            if not mine & (mine - 1):
                place += 1
                continue
            if place > furthest:
                furthest, near, jump = place, 0, 1
            p = next(p for p in preferred[i] if mine >> p & 1) if near < _PATIENCE else rng.choice(_options(mine))
            decisions.append((place, i, p, len(trail)))
            trail.append((i, mine))
            domains[i] = 1 << p
            wiped = self.propagate((i,), trail)
            while wiped is not None:
                fails, near = fails + 1, near + 1
                if fails >= _FAILS or (not fails & 15 and time.monotonic() > deadline):
                    return self._filled(preferred), False
                far = near >= _PATIENCE * jump
                if far:  # restart further back, with other options
                    jump *= 2
                    del decisions[max(len(decisions) - jump, 0) + 1 :]
                if not decisions:
                    return None, False
                place, j, q, mark = decisions.pop()
                while len(trail) > mark:
                    k, before = trail.pop()
                    domains[k] = before
                if far:
                    break
                # With the decisions before it fixed, this option is proven infeasible.
                trail.append((j, domains[j]))
                domains[j] &= ~(1 << q)
                wiped = self.propagate((j,), trail) if domains[j] else j
        return [each.bit_length() - 1 for each in domains], True

    def _filled(self, preferred: Mapping[int, Sequence[int]] | Sequence[Sequence[int]]) -> list[int]:
        decided = [each.bit_length() - 1 for each in self.domains]
        for i, each in enumerate(self.domains):
            if each & (each - 1) or not each:
                decided[i] = next((p for p in preferred[i] if each >> p & 1), preferred[i][0])
        return decided

    def _walk(self) -> list[int]:
        """Breadth-first order: neighbours in the graph are near in the order."""
        seen, order = bytearray(len(self.arcs)), []
        for start in range(len(self.arcs)):
            if seen[start]:
                continue
            seen[start] = 1
            front = [start]
            while front:
                order += front
                behind = []
                for i in front:
                    for j, _ in self.arcs[i]:
                        if not seen[j]:
                            seen[j] = 1
                            behind.append(j)
                front = behind
        return order


def _options(domain: int) -> list[int]:
    return [p for p in range(domain.bit_length()) if domain >> p & 1]


def _bits(rows: Numbers) -> list[int]:
    return [int.from_bytes(row.tobytes(), "little") for row in np.packbits(rows, axis=-1, bitorder="little")]
