"""Dims as products of atoms: two views of one dim become one, or must stay whole."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scrimp.planner.shard.dim_atoms import Atoms


def sizes(atoms: Atoms, factors: list[int]) -> list[int]:
    return [atoms.size(atom) for atom in atoms.of(factors)]


def test_a_dim_is_cut_where_another_sees_it_cut() -> None:
    atoms = Atoms()
    flat, three, heads, width = (atoms.new(size) for size in (192, 3, 4, 16))
    atoms.unify([flat], [three, heads, width])
    assert sizes(atoms, [flat]) == [3, 4, 16]
    assert atoms.of([flat]) == atoms.of([three, heads, width])
    again = atoms.new(64)
    atoms.unify([three, again], [flat])
    assert sizes(atoms, [again]) == [4, 16]


def test_what_must_be_whole_is_so_for_all_its_parts_and_all_that_it_is() -> None:
    atoms = Atoms()
    flat, major, minor = atoms.new(12, whole=True), atoms.new(3), atoms.new(4)
    atoms.unify([flat], [major, minor])
    assert all(atoms.whole(atom) for atom in atoms.of([major, minor]))


def test_what_cannot_be_made_one_stays_whole() -> None:
    atoms = Atoms()
    one, other = [atoms.new(4), atoms.new(3)], [atoms.new(3), atoms.new(4)]
    atoms.unify(one, other)
    assert all(atoms.whole(atom) for atom in (*atoms.of(one), *atoms.of(other)))
    with pytest.raises(ValueError, match="cannot be the same"):
        atoms.unify([atoms.new(4)], [atoms.new(2)])


@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5), st.data())
@settings(max_examples=60, deadline=None)
def test_any_two_ways_to_cut_a_dim(cuts: list[int], data: st.DataObject) -> None:
    """One dim cut up twice: the parts multiply to it, and are the same atoms unless they must be whole."""
    total = prod(cuts)
    order = data.draw(st.permutations(cuts))
    atoms = Atoms()
    one, other = [atoms.new(size) for size in cuts], [atoms.new(size) for size in order]
    atoms.unify(one, other)
    assert prod(sizes(atoms, one)) == prod(sizes(atoms, other)) == total
    loose = [atom for atom in atoms.of(one) if not atoms.whole(atom)]
    assert loose == [atom for atom in atoms.of(other) if not atoms.whole(atom)]
    before = atoms.of(one)
    atoms.unify(one, other)
    assert atoms.of(one) == before
