"""The engine on several ranks: chunks sharded, the numbers those of one process on the same global batch."""

from __future__ import annotations

import re

import pytest
import torch

from scrimp import zoo
from scrimp.ext.ranks import RankFailure, RankPool, pool
from tests.rank_jobs import engine as jobs
from tests.support.bounds import U

STEPS = 4


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("name", "optimizer", "clip", "recompute"),
    [
        ("gpt-tiny", "adamw", None, "keep"),
        ("gpt-tiny", "sgd", 0.5, "recompute,offload"),
        ("llama-tiny", "adamw", 0.5, "recompute,offload"),
        ("bert-tiny", "sgd", None, "keep"),
        ("vit-tiny", "adamw", None, "keep"),
        ("vgg-tiny", "sgd", 0.5, "recompute,offload"),
    ],
)
def test_ranks_equal_one_process(world: int, name: str, optimizer: str, clip: float | None, recompute: str) -> None:
    """The ranks' mean is PyTorch's, and a global batch has that mean for its gradient: in fp64, where the two can be told apart,
    they differ by less than fp32 could show."""
    compare(world, name, optimizer, clip, recompute)
    whole, *parts = (gradients(name, *which) for which in ((0, 1), *((rank, world) for rank in range(world))))
    largest = max(float(value.abs().max()) for value in whole.values())  # that of a key's bias is zero but for rounding
    for key, value in whole.items():
        mean = sum(part[key] for part in parts) / world
        assert float((mean - value).abs().max()) <= U * largest, key


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("name", "clip", "recompute"),
    [("moe-tiny", 0.5, "recompute,offload"), ("resnet-tiny", None, "keep"), ("resnet-tiny", 0.5, "recompute,offload")],
)
def test_ranks_equal_pytorchs_data_parallel(world: int, name: str, clip: float | None, recompute: str) -> None:
    """A balancing loss or a batch's statistics are no mean over samples, so ranks rightly differ from one process."""
    compare(world, name, "sgd", clip, recompute)


def compare(world: int, name: str, optimizer: str, clip: float | None, recompute: str) -> None:
    """Every step is the one that PyTorch's data parallel makes of the same weights, up to roundings that are counted. Without
    looking, the engine ends with the same bits."""
    settings = {"precision": "fp32", "clip_norm": clip, "activations": recompute, "chunk_numel": 5000}
    answers = pool(world).run(jobs.alongside, name, STEPS, optimizer, settings, timeout_seconds=300)
    wrong = {key: times for key, times in answers[0][4].items() if not times <= 1}
    assert not wrong, f"errors, as multiples of their bounds: {wrong}"
    first = answers[0][0]
    alone = pool(world).run(jobs.train, name, STEPS, optimizer, settings, timeout_seconds=300)
    for state, peak, _, budget, *_ in [*answers, *alone]:
        assert all(torch.equal(state[key], first[key]) for key in first), "ranks differ"
        assert peak <= budget


def gradients(name: str, rank: int, world: int) -> dict[str, torch.Tensor]:
    """In fp64, of a rank's share of a global batch."""
    torch.manual_seed(0)
    model = zoo.build(name).double()
    batch = [tensor.chunk(world)[rank] for tensor in zoo.example_batch(name, batch=8, step=0)]
    model(*(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch)).backward()
    return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}


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
        where = rf"rank {rank}, step 1, (at|before) layer .*: mesh rank {rank} of 3 failed"
        assert re.search(where, answers[rank]), answers[rank]
        assert f"rank {rank} calls engine.step as call 3, which rank 1 has not made" in answers[rank]


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
