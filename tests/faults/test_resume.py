"""A checkpoint goes on with another number of ranks: every state to the bit, and the next losses too, where sums are exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scrimp.ext.ranks import pool
from tests.rank_jobs.elastic import faults as jobs

FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("before", "after"), [(4, 2), pytest.param(2, 4, marks=FULL), pytest.param(4, 3, marks=FULL), pytest.param(8, 1, marks=FULL)]
)
def test_resumed_elsewhere(before: int, after: int, tmp_path: Path) -> None:
    """With three ranks sums are not exact, so only the states are compared."""
    saved = pool(before).run(jobs.saves, str(tmp_path))[0]
    loaded = pool(after).run(jobs.loads, str(tmp_path))[0]
    for name in ("exact", "gpt-tiny"):
        (state, losses), (their_state, their_losses) = loaded[name], saved[name]
        assert state.keys() == their_state.keys()
        assert all(torch.equal(value, their_state[key]) for key, value in state.items())
        if name == "exact" and after != 3:
            assert losses == their_losses
            assert len({*losses}) == len(losses)


def test_the_same_seed_gives_the_same_bits_every_time(tmp_path: Path) -> None:
    """Hashes of all that a checkpoint has, after every second step: on one machine they also find corruption."""
    runs = [pool(2).run(jobs.hashes, str(tmp_path / name), 6)[0] for name in ("first", "again")]
    assert runs[0] == runs[1]
    assert len({*runs[0]}) == 3
