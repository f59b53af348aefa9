"""Moves in buckets: the same bits in fewer moves, and no byte more at the peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scrimp import zoo
from scrimp.lower import buckets_of, chunks, later_axes, lower
from scrimp.lower.steps import Accumulate, Gather
from tests.lower.test_ranks import ROWS, planned
from tests.support.lowering.run import on_all_ranks

CASES = [
    ("gpt-tiny", "x=4", "zero-3"),
    ("gpt-tiny", "x=2,y=2", "least"),
    ("gpt-tiny", "x=2,y=2", "zero-2"),
    ("llama-tiny", "x=4", "ddp"),
    ("bert-tiny", "x=2,y=2", "zero-1"),
    ("moe-tiny", "x=4", "zero-3-full"),
    ("resnet-tiny", "x=4", "zero-3"),
]


@pytest.mark.parametrize(("name", "mesh", "way"), CASES)
def test_buckets_give_the_same_bits_in_fewer_moves_and_no_more_bytes(name: str, mesh: str, way: str) -> None:
    plan = planned(name, {}, mesh, way)
    torch.manual_seed(0)
    model, batch = zoo.build(name), zoo.example_batch(name, ROWS)
    apart = on_all_ranks(plan, plan.source.graph, model, batch)
    together = on_all_ranks(plan, plan.source.graph, model, batch, together=True)
    beside = on_all_ranks(plan, plan.source.graph, model, batch, together=True, beside=True)
    for one, *others in zip(apart, together, beside, strict=True):
        for other in others:
            assert one.loss == other.loss
            assert one.gradients.keys() == other.gradients.keys()
            assert all(torch.equal(one.gradients[key], other.gradients[key]) for key in one.gradients)
            assert other.moves <= one.moves
            assert other.peak_nbytes <= one.peak_nbytes
        assert others[0].moves == others[1].moves
    if way == "zero-3" and name == "gpt-tiny":
        assert together[0].moves < apart[0].moves / 2


def lowered_of(way: str) -> Any:
    plan = planned("gpt-tiny", {}, "x=4", way)
    return lower(plan, plan.source.graph)


@pytest.mark.parametrize("way", ["zero-3", "zero-1", "ddp"])
def test_every_gather_and_every_gradient_is_in_one_bucket(way: str) -> None:
    lowered = lowered_of(way)
    found = buckets_of(lowered, later_axes((lowered,), accumulated=False))
    for (k, backward), each in found.passes.items():
        steps = (lowered.layers[k].behind if backward else lowered.layers[k].ahead).steps
        for kind, groups in ((Gather, each.bring), (Accumulate, each.sum)):
            count = sum(isinstance(step, kind) for step in steps)
            assert sorted(number for group in groups for number in group) == [*range(count)]
        assert all(number >= first for first, group in enumerate(each.bring) for number in group)
        assert all(number <= last for last, group in enumerate(each.sum) for number in group)


def test_weights_of_the_last_layer_stay_for_its_backward() -> None:
    lowered = lowered_of("zero-3")
    found = buckets_of(lowered, {})
    last = len(lowered.layers) - 1
    assert found.passes[last, False].kept == found.passes[last, True].kept
    assert all(not each.kept for (k, _), each in found.passes.items() if k != last)


def test_chunks_stay_within_a_limit_but_hold_at_least_one() -> None:
    assert [*chunks([3, 3, 3, 9, 1, 1], 6)] == [[0, 1], [2], [3], [4, 5]]
    assert [*chunks([3, 3], 0)] == [[0], [1]]
    assert [*chunks([], 5)] == []
