"""A large problem as padded arrays, so that one numpy call handles thousands of nodes.

Options that a node does not have are forbidden, and so are their pairs. Edges between the same two nodes become one. Seconds of
pairs are in single precision, which is enough for the search; `evaluate` checks its result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from scrimp.planner.solver.points import Numbers
from scrimp.planner.solver.problem import Problem

MOST_NUMBERS = 4 * 10**8  # of all padded tables of pairs


class Holds:
    """Bytes over spans of points, by owner. `owner`: the node or edge; `table`: by option, or by pair; `stop`: after the last."""

    def __init__(self, owner: Any, first: Any, stop: Any, table: Numbers) -> None:
        owner, first, stop = (np.asarray(each, np.int64) for each in (owner, first, stop))
        if (np.diff(owner) < 0).any():
            order = np.argsort(owner, kind="stable")
            owner, first, stop, table = owner[order], first[order], stop[order], table[order]
        self.owner, self.first, self.stop, self.table = owner, first, stop, table
        # Start of each owner's holds, for `reduceat`.
        self.owners, self.begins = np.unique(owner, return_index=True)


class Arrays:
    """`unary`, `pair`: seconds by node and by edge, infinite where forbidden. `ends`: of an edge its nodes, the smaller first."""

    def __init__(self, problem: Problem) -> None:
        sizes = [len(node.options) for node in problem.nodes]
        self.count, self.points, self.width = len(sizes), problem.points, max(sizes)
        self.unary = np.full((self.count, self.width), np.inf)
        self._fill(self.unary, [(i, node.seconds) for i, node in enumerate(problem.nodes)])
        placed: dict[tuple[int, int], int] = {}
        flat: list[tuple[int, Any]] = []  # the first edge between two nodes
        more: list[tuple[int, Any]] = []
        pair_owners, pair_holds, pair_tables = [], [], []
        for edge in problem.edges:
            one, two = edge.nodes
            key = (one, two) if one < two else (two, one)
            known = key in placed
            k = placed.setdefault(key, len(placed))
            turned = one > two
            (more if known else flat).append((k, np.asarray(edge.seconds).T if turned else edge.seconds))
            for hold in edge.holds:
                pair_owners.append(k)
                pair_holds.append(hold)
                pair_tables.append(np.asarray(hold.nbytes).T if turned else hold.nbytes)
        self.ends = np.array(list(placed), np.int64).reshape(-1, 2)
        self.pair = np.full((len(placed), self.width, self.width), np.inf, np.float32)
        self._fill(self.pair, flat)
        for k, table in more:
            table = np.asarray(table)
            self.pair[k, : table.shape[0], : table.shape[1]] += table
        owners = [i for i, node in enumerate(problem.nodes) for _ in node.holds]
        holds = [hold for node in problem.nodes for hold in node.holds]
        tables = np.zeros((len(holds), self.width))
        self._fill(tables, [(k, hold.nbytes) for k, hold in enumerate(holds)])
        self.node_holds = Holds(owners, [hold.first for hold in holds], [hold.last + 1 for hold in holds], tables)
        pairs = np.zeros((len(pair_holds), self.width, self.width))
        self._fill(pairs, list(enumerate(pair_tables)))
        firsts, stops = [hold.first for hold in pair_holds], [hold.last + 1 for hold in pair_holds]
        self.pair_holds = Holds(pair_owners, firsts, stops, pairs)

    @staticmethod
    def fits(problem: Problem) -> bool:
        """Whether the padded tables fit in memory."""
        width = max(len(node.options) for node in problem.nodes)
        return (len(problem.edges) + sum(len(edge.holds) for edge in problem.edges)) * width**2 <= MOST_NUMBERS

    @staticmethod
    def _fill(target: Numbers, rows: Sequence[tuple[int, Any]]) -> None:
        """Fills tables of one shape at a time."""
        alike: dict[Any, tuple[list[int], list[Any]]] = defaultdict(lambda: ([], []))
        deep = target.ndim == 3
        for k, table in rows:
            shape = (len(table), len(table[0])) if deep else (len(table),)
            places, tables = alike[shape]
            places.append(k)
            tables.append(table)
        for shape, (places, tables) in alike.items():
            block = np.array(tables, target.dtype)
            if deep:
                target[places, : shape[0], : shape[1]] = block
            else:
                target[places, : shape[0]] = block

    def restrict(self, left: Numbers) -> None:
        """Restricts each node to these options, in place."""
        self.unary[~left] = np.inf

    def node_bytes(self, choice: Numbers) -> Numbers:
        holds = self.node_holds
        nbytes: Numbers = holds.table[np.arange(len(holds.owner)), choice[holds.owner]]
        return nbytes

    def pair_bytes(self, choice: Numbers) -> Numbers:
        holds = self.pair_holds
        one, two = self.ends[holds.owner].T
        nbytes: Numbers = holds.table[np.arange(len(holds.owner)), choice[one], choice[two]]
        return nbytes

    def changes(self, choice: Numbers) -> Numbers:
        """The change of the bytes held at each point, and after the last."""
        change = np.zeros(self.points + 1)
        for holds, nbytes in ((self.node_holds, self.node_bytes(choice)), (self.pair_holds, self.pair_bytes(choice))):
            change += np.bincount(holds.first, nbytes, self.points + 1) - np.bincount(holds.stop, nbytes, self.points + 1)
        return change

    def profile(self, choice: Numbers) -> Numbers:
        return np.cumsum(self.changes(choice)[:-1])

    def held(self, choice: Numbers) -> float:
        return float(self.node_bytes(choice).sum() + self.pair_bytes(choice).sum())
