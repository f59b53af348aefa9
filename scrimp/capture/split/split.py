"""Finds the layer boundaries.

paths     walks the module tree from the top. It cuts between the runs of a module's children if two of the pieces are
          identical, or a child is cut itself. Members of a list stay layers of their own; the calls between, before and
          after them are one layer each.
narrow    inside members, it cuts only where no more values with gradients cross than at the member's start: convolutions of a
          residual block, or experts, may be identical but are no layers.
chains    where no path repeats, it cuts wherever exactly one value with a gradient crosses; if pieces repeat.
whole     otherwise the model is one layer.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from torch import fx

from scrimp.capture.graph.graph import Parameter
from scrimp.capture.split.segment import key, stretch
from scrimp.capture.torch_private.dynamo import grad_switch
from scrimp.capture.trace.clean import tensor_of

Span = tuple[int, int]
Run = tuple[str | None, int, int]  # the child that makes these calls, None for the module's own; first, and after the last


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Nodes `first` up to `last`. `member`: a layer of its own; others may be merged with their neighbours."""

    path: str
    first: int
    last: int
    member: bool = False


class Splitter:
    def __init__(self, nodes: Sequence[fx.Node], paths: Sequence[str], owned: Mapping[fx.Node, Parameter]) -> None:
        self.nodes, self.owned = nodes, owned
        self.paths = [tuple(path.split(".")) if path else () for path in paths]
        self.widths = _widths(nodes)
        self.keys: dict[Span, int] = {}
        self.numbers: dict[Hashable, int] = {}  # of the keys, which are long

    def split(self) -> list[Piece]:
        pieces = self._join(self._below((), 0, len(self.nodes), math.inf))
        if not self._repeat(pieces):
            pieces = self._chains()
        return pieces

    def _below(self, path: tuple[str, ...], first: int, last: int, limit: float) -> list[Piece]:
        """The pieces of a module's run; one, if it is not cut."""
        whole = [Piece(path=".".join(path), first=first, last=last)]
        runs = self._runs(path, first, last, limit)
        if len(runs) < 2 and (not runs or runs[0][0] is None):
            return whole
        listed = all(child is None or child.isdigit() for child, _, _ in runs)
        alike = self._repeated([(start, end) for _, start, end in runs if listed or self._is_compound(start, end)])
        runs, alike = self._extended(runs, alike, limit)
        pieces: list[Piece] = []
        for child, start, end in runs:
            if child is None:
                pieces.append(Piece(path=".".join(path), first=start, last=end))
                continue
            inner = self.widths[start] if listed or (start, end) in alike else limit
            below = self._below((*path, child), start, end, inner)
            member = len(below) == 1 and (listed or (start, end) in alike)
            pieces += [replace(below[0], path=self._path(start, end, (*path, child)), member=True)] if member else below
        cut = any(child is not None and (start, end) in alike for child, start, end in runs)
        return pieces if cut or len(pieces) > len(runs) else whole

    def _extended(self, runs: list[Run], alike: set[Span], limit: float) -> tuple[list[Run], set[Span]]:
        """Adds to each identical run the calls that the module itself makes after it (a residual sum)."""
        groups: dict[int, list[int]] = {}
        for k, (_, start, end) in enumerate(runs):
            if (start, end) in alike:
                groups.setdefault(self._key(start, end), []).append(k)
        longer = [0] * len(runs)
        for group in groups.values():
            room = min(self._own_calls(runs, k) for k in group)
            for more in range(room, 0, -1):
                spans = [(runs[k][1], runs[k][2] + more) for k in group]
                if len({self._key(*span) for span in spans}) == 1 and all(self._may_cut(end, limit) for _, end in spans):
                    for k in group:
                        longer[k] = more
                    break
        made: list[Run] = []
        for k, (child, start, end) in enumerate(runs):
            start += longer[k - 1] if k else 0
            if start < end + longer[k]:
                made.append((child, start, end + longer[k]))
        stretched = {(start, end + longer[k]) for k, (_, start, end) in enumerate(runs) if (start, end) in alike}
        return made, stretched

    def _own_calls(self, runs: list[Run], k: int) -> int:
        if k + 1 == len(runs) or runs[k + 1][0] is not None or self._holds_parameters(*runs[k + 1][1:]):
            return 0
        return runs[k + 1][2] - runs[k + 1][1]

    def _is_compound(self, first: int, last: int) -> bool:
        """Whether it has several modules with parameters: two norms of a model may be identical, but are no layers."""
        return len({self.paths[k] for k in range(first, last) if self._holds_parameters(k, k + 1)}) > 1

    def _runs(self, path: tuple[str, ...], first: int, last: int, limit: float) -> list[Run]:
        """Neighbouring calls of the same child, merged where a cut between them would be too wide."""
        depth = len(path)

        def child_of(k: int) -> str | None:
            below = self.paths[k]
            return below[depth] if below[:depth] == path and len(below) > depth else None

        runs: list[Run] = []
        for child, group in groupby(range(first, last), child_of):
            ks = list(group)
            start, end = ks[0], ks[-1] + 1
            if runs and not self._may_cut(start, limit):
                before = runs.pop()
                runs.append((None if before[0] != child else child, before[1], end))
            else:
                runs.append((child, start, end))
        return runs

    def _may_cut(self, place: int, limit: float) -> bool:
        return self.widths[place] <= limit and self.widths[place] != math.inf

    def _join(self, pieces: list[Piece]) -> list[Piece]:
        """Merges pieces that are no members with their neighbours; those without parameters with the layer before, the first ones
        with the one after."""
        joined: list[Piece] = []
        for piece in pieces:
            before = joined[-1] if joined else None
            if before is not None and not before.member and not piece.member:
                joined[-1] = replace(before, path=_common(before.path, piece.path), last=piece.last)
            else:
                joined.append(piece)
        kept: list[Piece] = []
        for piece in joined:
            if kept and not self._has_parameters(piece):
                kept[-1] = replace(kept[-1], last=piece.last)
            elif len(kept) == 1 and not self._has_parameters(kept[0]):
                kept[0] = replace(piece, first=kept[0].first)
            else:
                kept.append(piece)
        return kept

    def _chains(self) -> list[Piece]:
        cuts = [k for k in range(1, len(self.nodes)) if self.widths[k] == 1]
        edges = [0, *cuts, len(self.nodes)]
        atoms = [Piece(path=self._path(a, b), first=a, last=b, member=True) for a, b in pairwise(edges)]
        atoms = self._join(atoms)
        again = self._repeated([(atom.first, atom.last) for atom in atoms])
        pieces = self._join([replace(atom, member=(atom.first, atom.last) in again) for atom in atoms])
        return pieces if self._repeat(pieces) else [Piece(path="", first=0, last=len(self.nodes), member=True)]

    def _path(self, first: int, last: int, below: tuple[str, ...] = ()) -> str:
        """The path of the innermost module that makes all of these calls."""
        inside = [".".join(path) for path in self.paths[first:last] if path[: len(below)] == below]
        return functools.reduce(_common, inside)

    def _repeat(self, pieces: Sequence[Piece]) -> bool:
        return bool(self._repeated([(piece.first, piece.last) for piece in pieces]))

    def _repeated(self, spans: Sequence[Span]) -> set[Span]:
        """The spans with parameters that occur more than once."""
        keys = {span: self._key(*span) for span in spans if self._holds_parameters(*span)}
        counts = Counter(keys.values())
        return {span for span, found in keys.items() if counts[found] > 1}

    def _key(self, first: int, last: int) -> int:
        """Equal for identical segments."""
        if (first, last) not in self.keys:
            found = key(stretch(self.nodes[first:last]), self.owned)
            self.keys[first, last] = self.numbers.setdefault(found, len(self.numbers))
        return self.keys[first, last]

    def _has_parameters(self, piece: Piece) -> bool:
        return self._holds_parameters(piece.first, piece.last)

    def _holds_parameters(self, first: int, last: int) -> bool:
        return any(
            given in self.owned and not self.owned[given].buffer
            for node in self.nodes[first:last]
            for given in node.all_input_nodes
        )


def _common(one: str, two: str) -> str:
    parts = []
    for a, b in zip(one.split("."), two.split("."), strict=False):
        if a != b:
            break
        parts.append(a)
    return ".".join(parts)


def _widths(nodes: Sequence[fx.Node]) -> list[float]:
    """Before each node, and after the last: how many values with gradients cross. Infinite where no cut is allowed: a value that
    crosses is not a tensor, or gradients are not recorded."""
    place = {node: k for k, node in enumerate(nodes)}
    change = [0.0] * (len(nodes) + 2)
    barred = [False] * (len(nodes) + 1)
    recording = True
    for k, node in enumerate(nodes):
        switch = grad_switch(node)
        recording = recording if switch is None else switch
        barred[k + 1] = barred[k + 1] or not recording
        last = max((place.get(user, len(nodes)) for user in node.users), default=k)
        tensor = tensor_of(node)
        if tensor is None:
            for between in range(k + 1, last + 1):
                barred[between] = True
        elif tensor.requires_grad and last > k:
            change[k + 1] += 1
            change[last + 1] -= 1
    widths: list[float] = []
    live = 0.0
    for k in range(len(nodes) + 1):
        live += change[k]
        widths.append(math.inf if barred[k] else live)
    return widths
