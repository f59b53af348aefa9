"""Shrinks a large problem: removes infeasible options, and merges nodes that follow another.

arcs       an option that no option at the other end of an edge allows is removed, and so on along the edges (arc consistency)
followers  an edge may allow only one option of a node for each option of another, as a view or an update in place does. Then the
           other, its leader, decides for both: the follower's costs and edges become the leader's. Without that, a group of nodes
           that can only change together is stuck wherever its edges close a cycle: the search moves trees (`large/forest.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scrimp.errors import PlanError
from scrimp.planner.large.arrays import Arrays, Holds
from scrimp.planner.solver.points import Numbers


def consistent(arrays: Arrays, names: Sequence[str]) -> Numbers:
    """By node, the options that arc consistency leaves. `PlanError` if a node has none."""
    left: Numbers = np.isfinite(arrays.unary)
    allowed, ends = np.isfinite(arrays.pair), arrays.ends
    active = np.arange(len(ends))
    changed = np.ones(arrays.count, bool)
    while len(active):
        one, two = ends[active].T
        tables = allowed[active]
        gone_two = left[two] & ~(tables & left[one][:, :, None]).any(axis=1)
        gone_one = left[one] & ~(tables & left[two][:, None, :]).any(axis=2)
        changed[:] = False
        for nodes, gone in ((one, gone_one), (two, gone_two)):
            at, option = np.nonzero(gone)
            left[nodes[at], option] = False
            changed[nodes[at]] = True
        empty = changed & ~left.any(axis=1)
        if empty.any():
            i = int(np.argmax(empty))
            others = [names[j] for edge in ends[(ends == i).any(axis=1)].tolist() for j in edge if j != i]
            raise PlanError(
                f"infeasible problem: every option of node '{names[i]}' is forbidden, by itself or by all options left of "
                f"its neighbours {', '.join(others[:8])}. Allow another option, or another pair of options of these"
            )
        active = np.flatnonzero(changed[ends].any(axis=1))
    arrays.restrict(left)
    return left


@dataclass(frozen=True, kw_only=True)
class Contracted:
    """`leader`: of each node of the whole problem, the node of `arrays` that decides for it; `follows`: by the leader's option,
    its own."""

    arrays: Arrays
    leader: Numbers
    follows: Numbers

    def original(self, choice: Numbers) -> Numbers:
        return self.follows[np.arange(len(self.leader)), choice[self.leader]]

    def contracted(self, choice: Numbers) -> Numbers | None:
        """None if no choice of the leaders corresponds to it."""
        agrees = (self.follows == choice[:, None]).astype(np.int64)
        votes = np.zeros((self.arrays.count, self.arrays.width), np.int64)
        np.add.at(votes, self.leader, agrees)
        votes[~np.isfinite(self.arrays.unary)] = -1
        found = votes.argmax(axis=1)
        return found if np.array_equal(self.original(found), choice) else None


def contract(arrays: Arrays, left: Numbers) -> Contracted:
    """`left`: the result of `consistent`."""
    leader, follows, left = _leaders(arrays, left)
    kept, number = np.unique(leader, return_inverse=True)
    small = Arrays.__new__(Arrays)
    small.count, small.points, small.width = len(kept), arrays.points, arrays.width
    rows = np.arange(arrays.count)
    order = np.argsort(number, kind="stable")
    begins = np.searchsorted(number[order], np.arange(len(kept)))
    small.unary = np.add.reduceat(arrays.unary[rows[:, None], follows][order], begins, axis=0)
    small.unary[~left[kept]] = np.inf
    one, two = arrays.ends.T
    pair = arrays.pair
    moved = (follows != np.arange(arrays.width)).any(axis=1)
    through = np.flatnonzero(moved[one] | moved[two])
    if len(through):
        pair = pair.copy()
        pair[through] = _through(pair[through], follows[one[through]], follows[two[through]])
    held = arrays.pair_holds
    held_table = held.table
    if len(held.owner):
        held_table = _through(held_table, follows[one[held.owner]], follows[two[held.owner]])
    one, two = number[one], number[two]
    turned = one > two
    pair = np.where(turned[:, None, None], pair.transpose(0, 2, 1), pair) if turned.any() else pair
    low, high = np.minimum(one, two), np.maximum(one, two)
    inner = low == high
    if inner.any():
        np.add.at(small.unary, low[inner], np.diagonal(pair[inner], axis1=1, axis2=2))
    _, first, place = np.unique(low * small.count + high, return_index=True, return_inverse=True)
    outer = ~inner[first]
    number_of = np.cumsum(outer) - 1
    small.ends = np.stack([low[first[outer]], high[first[outer]]], axis=1)
    small.pair = pair[first[outer]]
    more = np.setdiff1d(np.flatnonzero(~inner), first)
    if len(more):
        np.add.at(small.pair, number_of[place[more]], pair[more])
    nodes = arrays.node_holds
    owner, begin, stop = number[nodes.owner], nodes.first, nodes.stop
    table = nodes.table[np.arange(len(owner))[:, None], follows[nodes.owner]]
    if len(held.owner):
        held_table = np.where(turned[held.owner][:, None, None], held_table.transpose(0, 2, 1), held_table)
        own = inner[held.owner]
        owner = np.concatenate([owner, low[held.owner[own]]])
        begin, stop = np.concatenate([begin, held.first[own]]), np.concatenate([stop, held.stop[own]])
        table = np.concatenate([table, np.diagonal(held_table[own], axis1=1, axis2=2)])
        small.pair_holds = Holds(number_of[place[held.owner[~own]]], held.first[~own], held.stop[~own], held_table[~own])
    else:
        small.pair_holds = held
    small.node_holds = Holds(owner, begin, stop, table)
    return Contracted(arrays=small, leader=number, follows=follows)


def _through(tables: Numbers, one: Numbers, two: Numbers) -> Numbers:
    """Tables reindexed by other options: `one` and `two` give the option at each position."""
    return tables[np.arange(len(tables))[:, None, None], one[:, :, None], two[:, None, :]]


def _leaders(arrays: Arrays, left: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Of each node its leader (itself, if it follows none), and its option by the leader's; and the leaders' remaining
    options."""
    ends, width = arrays.ends, arrays.width
    allowed = np.isfinite(arrays.pair) & left[ends[:, 0]][:, :, None] & left[ends[:, 1]][:, None, :]
    by_two = (allowed.sum(axis=1) <= 1).all(axis=1)  # the first end follows the second
    by_one = (allowed.sum(axis=2) <= 1).all(axis=1)
    edges = np.flatnonzero(by_two | by_one)
    # The option of the first end by that of the second, and vice versa; -1 where there is none.
    firsts = np.where(allowed[edges].any(axis=1), allowed[edges].argmax(axis=1), -1).tolist()
    seconds = np.where(allowed[edges].any(axis=2), allowed[edges].argmax(axis=2), -1).tolist()
    leader = list(range(arrays.count))
    identity = list(range(width))
    maps: dict[int, list[int]] = {}
    members: dict[int, list[int]] = {}
    gone: dict[int, set[int]] = {}
    possible = left.tolist()
    for (i, j), first, second, two_leads, one_leads in zip(
        ends[edges].tolist(), firsts, seconds, by_two[edges].tolist(), by_one[edges].tolist(), strict=True
    ):
        if leader[i] == leader[j]:
            continue
        larger = len(members.get(leader[i], ())) > len(members.get(leader[j], ()))
        ways = [(i, j, first)] * two_leads + [(j, i, second)] * one_leads  # follower, leader, and the map of options
        for follower, other, how in reversed(ways) if larger else ways:
            mine, theirs = leader[follower], leader[other]
            step = [how[q] for q in maps[other]] if other in maps else how
            if mine != follower or mine in gone:
                mapped, missing = maps.get(follower, identity), gone.get(mine, ())
                options = [p for p in range(width) if possible[mine][p] and p not in missing]
                inverse = {mapped[p]: p for p in options}
                if len(inverse) < len(options):
                    continue  # several options of its leader map to this one: it does not determine the leader's
                step = [inverse.get(p, -1) for p in step]
            here = [p if p >= 0 else 0 for p in step]
            moved = members.pop(mine, None) or [mine]
            for k in moved:
                maps[k] = [maps[k][p] for p in here] if k in maps else here
                leader[k] = theirs
            members.setdefault(theirs, [theirs]).extend(moved)
            if -1 in step:
                gone.setdefault(theirs, set()).update(q for q, p in enumerate(step) if p < 0)
            break
    follows = np.tile(np.arange(width), (arrays.count, 1))
    if maps:
        follows[list(maps)] = list(maps.values())
    left = left.copy()
    for i, without in gone.items():
        left[i, list(without)] = False
    return np.array(leader), follows, left
