"""Rank 0's parameters on every rank: together where they are small, and not at all where all ranks have them."""

from __future__ import annotations

import pytest

from scrimp.ext.ranks import pool


@pytest.mark.parametrize(("joined_nbytes", "sent"), [(1, 8), (200, 6), (1 << 20, 4)])
def test_every_rank_gets_the_values_of_the_first(joined_nbytes: int, sent: int) -> None:
    found = pool(2).run("tests.rank_jobs.moves:each_from_first", same=False, joined_nbytes=joined_nbytes)
    assert all(all(each["alike"]) for each in found)
    assert {each["sent"] for each in found} == {sent}


def test_values_that_all_ranks_have_are_not_sent() -> None:
    found = pool(2).run("tests.rank_jobs.moves:each_from_first", same=True, joined_nbytes=1 << 20)
    assert all(all(each["alike"]) for each in found)
    assert {each["sent"] for each in found} == {0}
