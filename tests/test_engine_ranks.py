"""The engine on several ranks: chunks sharded, the numbers those of one process on the same global batch."""

from __future__ import annotations

import re

import pytest
import torch

from scrimp.ext.ranks import RankFailure, RankPool, pool
from tests import engine_jobs as jobs


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("name", "optimizer", "clip", "recompute"),
    [
        ("gpt-tiny", "adamw", None, "none"),
        ("gpt-tiny", "sgd", 0.5, "all"),
        ("llama-tiny", "adamw", 0.5, "all"),
        ("bert-tiny", "sgd", None, "none"),
        # not AdamW: the gradient of a key's bias is zero but for rounding, and AdamW makes full steps of that noise
        ("vit-tiny", "sgd", None, "none"),
        ("vgg-tiny", "sgd", 0.5, "all"),
    ],
)
def test_ranks_equal_one_process(world: int, name: str, optimizer: str, clip: float | None, recompute: str) -> None:
    settings = {"precision": "fp32", "clip_norm": clip, "recompute": recompute, "chunk_numel": 5000}
    answers = pool(world).run(jobs.train, name, 10, optimizer, settings, timeout_seconds=300)
    compare(jobs.plain(name, 10, optimizer, clip), answers)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("name", "clip", "recompute"), [("moe-tiny", 0.5, "all"), ("resnet-tiny", None, "none"), ("resnet-tiny", 0.5, "all")]
)
def test_ranks_equal_pytorchs_data_parallel(world: int, name: str, clip: float | None, recompute: str) -> None:
    """A balancing loss or a batch's statistics are no mean over samples, so ranks rightly differ from one process."""
    settings = {"precision": "fp32", "clip_norm": clip, "recompute": recompute, "chunk_numel": 5000}
    answers = pool(world).run(jobs.train, name, 10, "sgd", settings, timeout_seconds=300)
    compare(pool(world).run(jobs.distributed, name, 10, clip, timeout_seconds=300)[0], answers)


def compare(want: dict[str, torch.Tensor], answers: list[tuple[dict[str, torch.Tensor], int, int, int]]) -> None:
    first = answers[0][0]
    for key, value in want.items():
        if not value.is_floating_point():
            continue
        error = float((first[key] - value).abs().max() / value.abs().max().clamp(min=1e-6))
        assert error <= 1e-5, f"{key}: {error}"
    for state, peak, _, budget in answers:
        assert all(torch.equal(state[key], first[key]) for key in first), "ranks differ"
        assert peak <= budget


def test_host_memory_is_shared_out() -> None:
    def host_nbytes(world: int) -> int:
        return max(pool(world).run(jobs.host_at_first, "gpt-tiny"))

    assert host_nbytes(4) <= host_nbytes(1) / 4 * 1.2


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all() -> None:
    for answer in pool(2).run(jobs.fault, "nan"):
        assert "skipped=1 same=True" in answer, answer
        assert "blocks.1.norm1.weight is not finite" in answer


def test_a_hung_rank_ends_the_others_in_time_naming_step_and_layer() -> None:
    with RankPool(3, timeout_seconds=60, collective_timeout_seconds=3) as ranks:
        answers = ranks.run(jobs.fault, "hung")
    for rank in (0, 2):
        assert re.match(rf"rank {rank}, step 1, (at|before) layer .*: mesh rank {rank} of 3 failed", answers[rank]), answers[rank]


def test_a_dead_rank_ends_the_others() -> None:
    with RankPool(3, timeout_seconds=60, collective_timeout_seconds=3) as ranks, pytest.raises(RankFailure) as caught:
        ranks.run(jobs.fault, "dead", grace_seconds=15)
    assert "exit code 9" in str(caught.value)
    assert not caught.value.standing


@pytest.mark.parametrize("tenths", [[10, 14, 18, 22], pytest.param([12, 16, 20, 24], marks=pytest.mark.full)], ids=str)
def test_layers_that_come_ahead_do_not_go_while_they_come(tenths: list[int]) -> None:
    """A gather packs what it sends: where that passed the budget, room was made by dropping the very layer."""
    for answers in pool(2).run(jobs.within_budgets, tenths, timeout_seconds=300):
        for budget, peak, up, least_up, down, least_down in answers:
            assert peak <= budget
            assert up >= least_up
            assert down == least_down
