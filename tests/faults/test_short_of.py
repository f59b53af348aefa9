"""Memory that runs short in the steady state, a slow disk, a slow rank: training goes on with the same bits, or stops."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from scrimp.chunks.spill.file import SpillFile
from scrimp.chunks.store.disk_tier import STAGES
from scrimp.ext.ranks import RankPool, pool
from tests.engine.test_engine import assert_same
from tests.engine.update.test_disk_update import batch, engine_for, host_for, on_disk, small_blocks  # noqa: F401 - a fixture
from tests.rank_jobs.elastic import faults as jobs

SLEEP = 0.5


def test_a_step_that_does_not_fit_in_the_steady_state_runs_again_with_less(tmp_path: Path) -> None:
    """On every rank, in the same step, which is undone and run again."""
    for same, error, _, room in pool(2).run(jobs.memory_runs_short, str(tmp_path), 0.8, [0, 1]):
        assert not error
        assert same
        assert room[1] < room[0]  # a step did not fit, so the engine plans with less


def test_memory_for_no_layer_is_an_error_with_the_ledger_and_no_weight_changes(tmp_path: Path) -> None:
    for _, error, same, _ in pool(2).run(jobs.memory_runs_short, str(tmp_path), 0.05, [0, 1]):
        assert error.startswith("FitError: ")
        assert "parameters" in error
        assert same


@pytest.mark.full
def test_memory_that_runs_short_on_one_rank_leaves_no_rank_hanging(tmp_path: Path) -> None:
    with RankPool(2, timeout_seconds=60, collective_timeout_seconds=4) as ranks:
        said = ranks.run(jobs.memory_runs_short, str(tmp_path), 0.05, [1])
    assert all(error.startswith(("FitError: ", "RunError: ")) for _, error, _, _ in said)
    assert any("rank" in error and "step 6" in error for _, error, _, _ in said)


def test_a_slow_rank_only_takes_time() -> None:
    """The others wait for it in the step, whose seconds show it."""
    for calm, slow, seconds in pool(2).run(jobs.slow_rank, SLEEP):
        assert slow == calm
        assert seconds >= SLEEP / 2  # its sleep began after a barrier


@pytest.mark.usefixtures("small_blocks")
def test_a_slow_disk_only_takes_time_which_is_shown_and_its_queue_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every read and every write sleeps. A tile is not read before a staging buffer is free, so few requests wait."""
    monkeypatch.setattr("scrimp.chunks.store.disk_tier.TILE", 2048)
    settings: dict[str, Any] = {"precision": "bf16", "skip_nonfinite": False}
    engines = [engine_for(tmp_path / name, host=host_for(0.0), **settings) for name in ("quick", "slow")]
    assert on_disk(engines[1])
    queue, waiting, slept = engines[1]._run.store.spill.queue, [0], 0.0

    def slowed(real: Any) -> Any:
        def call(file: SpillFile, *args: Any, **kwargs: Any) -> Any:
            nonlocal slept
            waiting.append(len(queue._waiting))
            time.sleep(2e-3)
            slept += 2e-3
            return real(file, *args, **kwargs)

        return call

    losses = [float(engines[0].step(*batch(step))) for step in range(4)]
    for name in ("read", "write"):
        monkeypatch.setattr(SpillFile, name, slowed(getattr(SpillFile, name)))
    assert [float(engines[1].step(*batch(step))) for step in range(4)] == losses
    monkeypatch.undo()
    tile_requests = 3 * 2  # masters and two states, in pieces of half a tile
    assert 0 < max(waiting) <= STAGES * tile_requests
    bound = engines[1].bound()
    assert bound.waited_seconds > 0
    assert "waiting for updates" in str(bound)
    assert_same(engines[1].state_dict(), engines[0].state_dict())
