"""The counter of received bytes, against what collectives on two ranks must send."""

from __future__ import annotations

import torch
import torch.distributed as dist

from scrimp.ext.ranks import pool
from scrimp.layout import Mesh
from scrimp.move import received_nbytes, synthesize


def moved(source: str, target: str, numel: int) -> tuple[int, int]:
    """Runs on each rank: the bytes that two runs of a move count, each."""
    program = synthesize((numel,), Mesh({"x": 2}), source, target)
    found = []
    for _ in range(2):
        before = received_nbytes()
        local = torch.ones(numel // 2 if source == "[x]" else numel) * dist.get_rank()
        program.run(local)
        found.append(received_nbytes() - before)
    return found[0], found[1]


def test_a_gather_receives_the_other_half_and_a_sum_that_half_twice() -> None:
    assert pool(2).run(moved, "[x]", "[-]", 1000) == [(2000, 2000)] * 2
    assert pool(2).run(moved, "[-]+x", "[x]", 1000) == [(2000, 2000)] * 2
    assert pool(2).run(moved, "[-]+x", "[-]", 1000) == [(4000, 4000)] * 2


def test_a_slice_receives_nothing() -> None:
    assert pool(2).run(moved, "[-]", "[x]", 1000) == [(0, 0)] * 2
