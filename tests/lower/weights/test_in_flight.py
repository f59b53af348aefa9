"""Buckets of pipeline stages: the same bits in fewer moves, no byte more at the peak, and the count of bytes behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from scrimp import Mesh, Plan
from scrimp.capture import Graph, to_json
from scrimp.ext.ranks import pool
from scrimp.lower import Staged, lower_stages, stage_buckets
from scrimp.lower.footprint import piece_footprint
from scrimp.lower.steps import Accumulate, Gather
from scrimp.lower.weights.in_flight import border_of, stage_rooms
from scrimp.planner import tasks
from tests.support.lowering.staged import batch_for, build, graph_of, planned

ROWS, MICRO = 8, 4
Case = tuple[str, int, int, str, int]  # family, stages, pieces a stage, mesh, ZeRO level of all weights
CASE: Case = ("gpt", 2, 2, "x=2", 3)
FULL: list[Case] = [
    ("gpt", 2, 1, "x=2,y=2", 3),
    ("gpt", 2, 1, "x=2", 2),
    ("llama", 4, 1, "x=2", 3),
    ("t5", 2, 2, "x=2", 3),
    ("moe", 2, 1, "x=2", 3),
]


@cache
def lowered(case: Case) -> tuple[Plan, Graph, Staged]:
    """The plan of least time, which splits the batch, with all weights sharded as far as the level says."""
    family, stages, interleave, mesh, level = case
    if family == "t5":
        pytest.importorskip("transformers")
    model, batch = build(family), batch_for(family, ROWS)
    plan = planned(model, batch, mesh, stages, MICRO, interleave, time_limit=1, objective="time")
    plan = replace(plan, layers=tuple(replace(each, groups=_sharded(each.groups, level, plan.mesh)) for each in plan.layers))
    graph = graph_of(plan, model, batch)
    return plan, graph, lower_stages(plan, graph)


def _sharded(groups: Sequence[Any], level: int, mesh: Mesh) -> tuple[Any, ...]:
    return tuple(replace(group, level=(level,) * len(mesh.names)) for group in groups)


def peak_of(staged: Staged, stage: int) -> int:
    """The peak of slots by a walk over all tasks of a stage, in order."""
    numbers = range(stage, len(staged.pieces), staged.stages)
    alone = {k: piece_footprint(staged.pieces[k].lowered, border_of(staged.pieces[k])) for k in numbers}
    flying: list[int] = []
    peak = 0
    for task in tasks(stage, staged.stages, staged.micro_batches, len(alone)):
        passes, saved = alone[task.piece]
        if task.backward:
            flying.remove(saved)
        for (_, backward), each in passes.items():
            if backward == task.backward:
                peak = max(peak, sum(flying) + max(each.held))
        if not task.backward:
            flying.append(saved)
    return peak


@pytest.mark.parametrize("case", [CASE, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)])
def test_buckets_give_the_same_bits_in_fewer_moves_and_no_more_bytes(case: Case) -> None:
    plan, graph, staged = lowered(case)
    ran: list[Any] = pool(staged.stages * staged.mesh.size).run(
        "tests.rank_jobs.staged:bucketed", plan.to_json(), to_json(graph), case[0], 32, ROWS
    )
    for rank, ((one, apart, first, fixed), (other, together, second, _)) in enumerate(ran):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert together <= apart
        assert second <= first
        # What arrives has buffers, and what is sent is held: neither is in the count of slots.
        assert peak_of(staged, rank // staged.mesh.size) <= first - fixed
    assert sum(each[1][1] for each in ran) < sum(each[0][1] for each in ran)


def test_every_gather_and_every_gradient_is_in_one_bucket_and_the_room_is_never_more_than_the_peak() -> None:
    _, _, staged = lowered(CASE)
    for stage in range(staged.stages):
        found, room = stage_buckets(staged, stage, {}), stage_rooms(staged, stage)
        layers = {
            each.lowered.first + k: layer
            for each in staged.pieces[stage :: staged.stages] for k, layer in enumerate(each.lowered.layers)
        }  # fmt: skip
        assert found.passes.keys() == room.keys() == {(k, backward) for k in layers for backward in (False, True)}
        for (k, backward), each in found.passes.items():
            steps = (layers[k].behind if backward else layers[k].ahead).steps
            for kind, groups in ((Gather, each.bring), (Accumulate, each.sum)):
                count = sum(isinstance(step, kind) for step in steps)
                assert sorted(number for group in groups for number in group) == [*range(count)]
        assert max(max(left) for left in room.values() if left) <= peak_of(staged, stage)


def test_weights_stay_for_the_backward_only_where_it_follows_at_once() -> None:
    for interleave in (1, 2):
        _, _, staged = lowered(("gpt", 2, interleave, "x=2", 3))
        for stage in range(2):
            kept = {key for key, each in stage_buckets(staged, stage, {}).passes.items() if each.kept}
            last = max(each.lowered.first + len(each.lowered.layers) - 1 for each in staged.pieces)
            assert kept <= {(last, False), (last, True)}
