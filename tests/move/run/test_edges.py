"""Odd but legal uses, and mistakes at the edges, each once found by looking for trouble."""

from __future__ import annotations

import pytest

from scrimp.ext.ranks import RankPool
from tests.rank_jobs import move_edges as jobs

CASES = [
    jobs.kinds_of_partial, jobs.beside_the_users_own_messages, jobs.one_tensor_twice_donated, jobs.odd_inputs,
    jobs.names_that_contradict, jobs.not_a_member, jobs.wrong_box,
]  # fmt: skip


@pytest.mark.parametrize("job", CASES, ids=lambda job: job.__name__)
def test_edges(ranks4: RankPool, job: object) -> None:
    for rank, wrong in enumerate(ranks4.run(job, keep_after_failure=False)):  # type: ignore[arg-type]
        assert wrong is None, f"rank {rank}: {wrong}"
