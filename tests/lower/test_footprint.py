"""The static count of a step's bytes against a run of one rank, in which all live storages are counted."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from scrimp.lower import lower
from scrimp.lower.footprint import footprint, rooms
from scrimp.lower.moves import local_shape
from scrimp.move import ITEMSIZE
from tests.lower.test_ranks import planned
from tests.support.lowering.rehearse import rehearsed
from tests.support.lowering.run import at_rest_nbytes

CASES = [
    ("gpt-tiny", "x=2,y=2", "least"),
    ("gpt-tiny", "x=4", "zero-3"),
    ("llama-tiny", "x=2,y=2", "tp-sp"),
    ("bert-tiny", "x=4", "offload"),
    ("moe-tiny", "x=4", "zero-3-full"),
    ("vit-tiny", "x=4", "recompute"),
    ("resnet-tiny", "x=2,y=2", "zero-2"),
]


@pytest.mark.parametrize(("name", "mesh", "way"), CASES)
def test_the_peak_of_slots_is_that_of_a_run_without_moves_under_way(name: str, mesh: str, way: str) -> None:
    """A run counts the batch too, and the loss. Batch norm over split rows alone has temporaries of its own."""
    plan = planned(name, {}, mesh, way)
    graph: Any = plan.source.graph
    lowered = lower(plan, graph)
    found = footprint(lowered).values()
    held, most = max(max(each.held) for each in found), max(max(each.most) for each in found)
    batch = sum(prod(local_shape(lowered.batch[each.name], plan.mesh)) * ITEMSIZE[each.dtype] for each in graph.batch)
    ran = rehearsed(plan, graph) - at_rest_nbytes(lowered, plan.optimizer) - batch
    assert held <= ran
    assert ran - 64 <= (most if name == "resnet-tiny" else held)


def test_a_step_has_no_room_at_its_peak_and_some_elsewhere() -> None:
    plan = planned("gpt-tiny", {}, "x=4", "zero-3")
    lowered = lower(plan, plan.source.graph)
    room = rooms(lowered)
    assert min(min(each) for each in room.values()) <= 0 < max(max(each) for each in room.values())
    for key, found in footprint(lowered).items():
        program = lowered.layers[key[0]].behind if key[1] else lowered.layers[key[0]].ahead
        assert len(found.held) == len(found.most) == len(program.steps)
        assert all(held <= most for held, most in zip(found.held, found.most, strict=True))
