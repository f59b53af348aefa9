"""What goes wrong on one rank is an error on every rank, in time, and says which rank and what."""

from __future__ import annotations

import re

import pytest

from scrimp.ext.ranks import RankFailure, RankPool
from tests.rank_jobs import moves as jobs


@pytest.fixture(scope="module")
def ranks() -> RankPool:
    with RankPool(4, timeout_seconds=40, collective_timeout_seconds=3) as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ["rank 1", "(3, 8)", "(2, 8)"]),
        ("dtype", ["rank 1", "torch.float64", "torch.float32"]),
        ("mesh", ["x=8", "8 devices", "4 ranks"]),
        ("device mesh", ["(2, 2)", "x=4", "(4,)"]),
        ("many", ["rank 1", "(3, 8)", "(2, 8)"]),
    ],
)
def test_every_rank_names_the_rank_at_fault(ranks: RankPool, kind: str, words: list[str]) -> None:
    for answer in ranks.run(jobs.fault, kind):
        for word in words:
            assert word in answer, answer


def test_different_programs_are_told_apart_by_their_hashes(ranks: RankPool) -> None:
    for rank, answer in enumerate(ranks.run(jobs.fault, "program")):
        assert "different programs" in answer, answer
        first, second = re.findall(r"[0-9a-f]{15}", answer)[:2]
        assert first != second
        assert ("1" if rank != 1 else "0") in answer


def test_a_wrong_shape_after_the_first_run_ends_in_time() -> None:
    """Only rank 1 can know; the others wait for it no longer than the group's time-out."""
    with RankPool(4, timeout_seconds=40, collective_timeout_seconds=3) as ranks:
        answers = ranks.run(jobs.fault, "late shape")
    assert "(3, 8)" in answers[1]
    for rank in (0, 2, 3):
        assert f"mesh rank {rank} of 4 failed in step 1 of 1 (all_to_all x, dim 0 -> 1)" in answers[rank], answers[rank]


def test_a_hung_rank_ends_the_others_in_time() -> None:
    with RankPool(4, timeout_seconds=40, collective_timeout_seconds=3) as ranks:
        answers = ranks.run(jobs.fault, "hung")
    for rank in (0, 2, 3):
        assert f"mesh rank {rank} of 4 failed in step 1" in answers[rank], answers[rank]
        seconds = float(re.search(r"after ([0-9.]+) s", answers[rank])[1])  # type: ignore[index]
        assert seconds < 7


def test_a_dead_rank_ends_the_others_in_time() -> None:
    with RankPool(4, timeout_seconds=40, collective_timeout_seconds=3) as ranks, pytest.raises(RankFailure) as caught:
        ranks.run(jobs.fault, "dead", grace_seconds=15)
    assert "exit code 7" in str(caught.value)
    assert not caught.value.standing, "a rank was still waiting"
