"""Factors the dims of many operators into shared atoms.

Two operators that share a tensor see the same dims, but may factor them differently: one has 192, the other 3 x 64. Every dim is
a list of factors, major first; `unify` equates two lists, splitting factors where needed. Dims without a common factoring (4 x 3
and 3 x 4) must not be sharded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Atoms:
    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._parts: list[tuple[int, ...]] = []  # the factors it was split into; empty: it is an atom
        self._same: list[int] = []  # the atom it was equated with, or itself
        self._whole: list[bool] = []

    def new(self, size: int, *, whole: bool = False) -> int:
        self._sizes.append(size)
        self._parts.append(())
        self._same.append(len(self._same))
        self._whole.append(whole)
        return len(self._sizes) - 1

    def size(self, atom: int) -> int:
        return self._sizes[self._find(atom)]

    def whole(self, atom: int) -> bool:
        """Whether it must not be sharded."""
        return self._whole[self._find(atom)]

    def of(self, factors: Iterable[int]) -> tuple[int, ...]:
        """The current atoms of a product of factors, major first; sizes of 1 have none."""
        found: list[int] = []
        for factor in factors:
            factor = self._find(factor)
            if self._parts[factor]:
                found += self.of(self._parts[factor])
            elif self._sizes[factor] > 1:
                found.append(factor)
        return tuple(found)

    def keep_whole(self, factors: Iterable[int]) -> None:
        for atom in self.of(factors):
            self._whole[atom] = True

    def unify(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Equates two factorings of one dim."""
        while True:
            a, b = self.of(one), self.of(other)
            at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            if at is None:
                if len(a) != len(b):
                    raise ValueError(f"dims of {[self.size(x) for x in a]} and {[self.size(x) for x in b]} cannot be the same")
                return
            x, y = a[at], b[at]
            small, large = sorted((self._sizes[x], self._sizes[y]))
            if x in b[at + 1 :] or y in a[at + 1 :] or large % small:
                self.keep_whole((*a[at:], *b[at:]))
                return
            if small == large:
                self._same[y] = x
                self._whole[x] = self._whole[x] or self._whole[y]
            else:
                self._cut(x if self._sizes[x] == large else y, small)

    def _cut(self, atom: int, major: int) -> None:
        whole = self._whole[atom]
        self._parts[atom] = (self.new(major, whole=whole), self.new(self._sizes[atom] // major, whole=whole))

    def _find(self, factor: int) -> int:
        while self._same[factor] != factor:
            factor = self._same[factor]
        return factor
