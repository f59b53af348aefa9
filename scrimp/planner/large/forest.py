"""Exact choices on trees, for thousands of nodes at once: the steps of the search on large problems.

A forest is a set of nodes whose induced subgraph has no cycle. While all other nodes stay fixed, dynamic programming finds the
best options of a tree: from the leaves up, the least cost of each node's subtree by option; then from the root down. All trees
are processed together, a level at a time. Every forest is drawn at random, so that the fixed nodes differ from sweep to sweep.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scrimp.planner.large.arrays import Arrays
from scrimp.planner.solver.points import Numbers


@dataclass(frozen=True, kw_only=True)
class Level:
    """Nodes at one depth, their parents, and the edges to them: first those in which the node is the edge's first end (so many),
    then the others."""

    nodes: Numbers
    parents: Numbers
    edges: Numbers
    first: int


@dataclass(frozen=True, kw_only=True)
class Forest:
    """`tree`: of each node the number of its tree, -1 if it is fixed. `levels`: from the roots' children on. `inner`, `outer`:
    edges out of a tree by their ends, ordered by the inner end; `side`: which end of the edge that is."""

    tree: Numbers
    nodes: Numbers
    roots: Numbers
    levels: tuple[Level, ...]
    edges: Numbers
    inner: Numbers
    outer: Numbers
    side: Numbers


class Neighbours:
    def __init__(self, arrays: Arrays) -> None:
        self.ends = arrays.ends
        self.around: list[list[tuple[int, int]]] = [[] for _ in range(arrays.count)]
        for k, (one, two) in enumerate(arrays.ends.tolist()):
            self.around[one].append((two, k))
            self.around[two].append((one, k))

    def forest(self, rng: random.Random, free: Sequence[bool], most: int, depth: int) -> Forest:
        """Trees of at most so many nodes and levels, grown from random free nodes."""
        around, count = self.around, len(self.around)
        seeds = list(range(count))
        rng.shuffle(seeds)
        tree, level, touched = [-1] * count, [0] * count, bytearray(count)  # touched: by how many chosen nodes, up to 2
        parent, up = [-1] * count, [-1] * count
        trees = 0
        for seed in seeds:
            if touched[seed] or tree[seed] >= 0 or not free[seed]:
                continue
            front, size, at = [seed], 0, 0
            while at < len(front) and size < most:
                i = front[at]
                at += 1
                if touched[i] > (i != seed):
                    continue  # it would close a cycle, or join two trees
                tree[i], size = trees, size + 1
                deeper = level[i] < depth
                for j, k in around[i]:
                    if touched[j] < 2:
                        touched[j] += 1
                        if deeper and touched[j] == 1 and tree[j] < 0 and free[j]:
                            parent[j], up[j], level[j] = i, k, level[i] + 1
                            front.append(j)
            trees += 1
        return self._arranged(np.array(tree), np.array(level), np.array(parent), np.array(up))

    def _arranged(self, tree: Numbers, level: Numbers, parent: Numbers, up: Numbers) -> Forest:
        nodes = np.flatnonzero(tree >= 0)
        roots = nodes[level[nodes] == 0]
        levels = []
        rest = nodes[level[nodes] > 0]
        second = self.ends[up[rest], 0] != rest
        order = np.lexsort((second, level[rest]))
        rest, second = rest[order], second[order]
        for part in np.split(np.arange(len(rest)), np.flatnonzero(np.diff(level[rest])) + 1):
            if len(part):
                here = rest[part]
                first = int(len(part) - second[part].sum())
                levels.append(Level(nodes=here, parents=parent[here], edges=up[here], first=first))
        inside = tree[self.ends] >= 0
        edges = np.zeros(len(self.ends), bool)
        edges[up[rest]] = True
        # An edge between two nodes of a forest is one of its tree: else there would be a cycle, or two trees would touch.
        out = np.flatnonzero(inside[:, 0] != inside[:, 1])
        side = inside[out, 1].astype(np.int64)
        inner, outer = self.ends[out, side], self.ends[out, 1 - side]
        order = np.argsort(inner, kind="stable")
        return Forest(
            tree=tree, nodes=nodes, roots=roots, levels=tuple(levels), edges=out[order], inner=inner[order], outer=outer[order],
            side=side[order],
        )  # fmt: skip


def best_on(forest: Forest, unary: Numbers, pair: Numbers, choice: Numbers, most: float) -> Numbers:
    """The choice in which every tree has its best options. A forbidden option costs `most`, infinite or not."""
    costs = unary.copy()
    if len(forest.edges):
        first = forest.side == 0
        rows = np.empty((len(forest.edges), unary.shape[1]), pair.dtype)
        rows[first] = pair[forest.edges[first], :, choice[forest.outer[first]]]
        rows[~first] = pair[forest.edges[~first], choice[forest.outer[~first]], :]
        _add(costs, forest.inner, rows, most)
    ups: list[Numbers] = []
    for level in reversed(forest.levels):
        mine, cut = costs[level.nodes], level.first
        tables = pair[level.edges]
        if most < np.inf:
            np.minimum(tables, most, out=tables)
        messages = np.empty(mine.shape, costs.dtype)
        np.min(tables[:cut] + mine[:cut, :, None], axis=1, out=messages[:cut])
        np.min(tables[cut:] + mine[cut:, None, :], axis=2, out=messages[cut:])
        ups.append(mine)
        order = np.argsort(level.parents, kind="stable")
        _add(costs, level.parents[order], messages[order], most)
    found = choice.copy()
    found[forest.roots] = costs[forest.roots].argmin(axis=1)
    for level, mine in zip(forest.levels, reversed(ups), strict=True):
        cut, at = level.first, found[level.parents]
        rows = np.concatenate([pair[level.edges[:cut], :, at[:cut]], pair[level.edges[cut:], at[cut:], :]])
        if most < np.inf:
            np.minimum(rows, most, out=rows)
        found[level.nodes] = (mine + rows).argmin(axis=1)
    return found


def _add(costs: Numbers, places: Numbers, rows: Numbers, most: float) -> None:
    """Adds rows at these positions, which are sorted."""
    if most < np.inf:
        rows = np.minimum(rows, most)
    begins = np.flatnonzero(np.diff(places, prepend=-1))
    costs[places[begins]] += np.add.reduceat(rows, begins, axis=0)
