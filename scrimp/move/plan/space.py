"""The search space: types, the atoms they are made of, and paths over them.

A type is, for each dim, the stack of mesh atoms it is split over, as in `plan/search.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

Type = tuple[tuple[int, ...], ...]


class Op(NamedTuple):
    kind: str
    atoms: tuple[int, ...]
    dim: int = -1
    to_dim: int = -1


class Node(NamedTuple):
    """A type that can be reached from src (or that can reach dst), the cost so far, and the path."""

    dims: Type
    counts: tuple[int, ...]
    local: int
    price: float
    flat: float  # the part of the cost from flat steps, in local sizes
    ops: tuple[Op, ...]


@dataclass(frozen=True, kw_only=True)
class Path:
    """A program over atoms; `relabel` is the type a permute ends in, between the ops before and after it."""

    price: float
    before: tuple[Op, ...]
    relabel: Type | None
    after: tuple[Op, ...]


class Block(NamedTuple):
    """Cached properties of a run of atoms; atoms of the same size and link are of one kind."""

    sizes: tuple[int, ...]
    kinds: tuple[int, ...]
    members: int
    latency: float
    pace: float


@dataclass(frozen=True, kw_only=True)
class Space:
    """A move over atoms. `sizes`, `latency` and `pace` (seconds per element) are per atom; `reduced` atoms are
    partial in src only, `kept` atoms partial in both."""

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    cap: int
    sizes: tuple[int, ...]
    latency: tuple[float, ...]
    pace: tuple[float, ...]
    src: Type
    dst: Type
    reduced: tuple[int, ...]
    kept: tuple[int, ...]
    by_size: bool
    _blocks: dict[tuple[int, ...], Block] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def _kinds(self) -> tuple[int, ...]:
        """For each atom the first with its size and link."""
        links = list(zip(self.sizes, self.latency, self.pace, strict=True))
        return tuple(links.index(link) for link in links)

    def block(self, atoms: tuple[int, ...]) -> Block:
        known = self._blocks.get(atoms)
        if known is None:
            if not atoms:
                known = Block((), (), 1, 0.0, 0.0)
            else:  # one more than a block that is usually cached
                rest, last = self.block(atoms[:-1]), atoms[-1]
                known = Block(
                    (*rest.sizes, self.sizes[last]),
                    (*rest.kinds, self._kinds[last]),
                    rest.members * self.sizes[last],
                    max(rest.latency, self.latency[last]),
                    max(rest.pace, self.pace[last]),
                )
            self._blocks[atoms] = known
        return known

    def counts(self, dims: Type) -> tuple[int, ...]:
        return tuple([self.block(atoms).members for atoms in dims])

    def local(self, counts: tuple[int, ...]) -> int:
        numel = 1
        for size, whole, count in zip(self.shape, self.padded, counts, strict=True):
            part = whole // count
            numel *= part if part < size else size
        return numel

    def key(self, dims: Type) -> object:
        """Equal keys: the same type in this space."""
        return tuple([self.block(atoms).kinds for atoms in dims]) if self.by_size else dims
