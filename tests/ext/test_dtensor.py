"""The DTensor door against the full tensor, also where torch itself is wrong."""

from __future__ import annotations

import pytest

from scrimp.ext.ranks import RankPool
from tests.rank_jobs import dtensor as jobs


@pytest.mark.parametrize("shape", [(8, 16), (10, 6), (7, 5), (3, 3), (5, 3)], ids=str)
def test_every_pair_of_placements_equals_the_full_tensor(ranks8: RankPool, shape: tuple[int, int]) -> None:
    for bad in ranks8.run(jobs.every_pair, shape):
        assert not bad, bad[0]


def test_a_flattened_mesh_and_uneven_rows(ranks4: RankPool) -> None:
    """torch 2.13 returns wrong rows here without a word; if it no longer does, its answer is ours."""
    for ours, theirs in ranks4.run(jobs.flattened):
        assert ours
        assert theirs in (True, False)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_partial_tensors(ranks8: RankPool, op: str) -> None:
    for bad in ranks8.run(jobs.partial, op):
        assert not bad, bad[0]


def test_gradients_flow_back_to_the_source_placements(ranks8: RankPool) -> None:
    for bad in ranks8.run(jobs.gradients):
        assert not bad, bad[0]


def test_a_three_dim_mesh_and_tensor(ranks8: RankPool) -> None:
    for bad in ranks8.run(jobs.three_dims):
        assert not bad, bad[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("count", ["1 placements", "2 dims"]),
        ("dim", ["S(5)", "mesh dim 0", "(8, 16)"]),
        ("partial", ["mesh dim 0", "P(sum)", "R"]),
        ("plain", ["Tensor", "DTensor"]),
        ("strided", ["_S(0, 2)", "Replicate"]),
    ],
)
def test_what_is_refused_and_why(ranks8: RankPool, kind: str, words: list[str]) -> None:
    for answer in ranks8.run(jobs.refused, kind):
        for word in words:
            assert word in answer, answer
