"""The model's buffers in a plan's bytes: each device holds all of them, whole, once."""

from __future__ import annotations

import pytest
import torch

from scrimp import Plan, plan, zoo

BUFFERS = 3000 * 4 + 500 * 8


def planned(buffers: bool, **pipeline: int) -> Plan:
    """The plan of a GPT, with buffers that nothing reads: so the rest of both plans is the same."""
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", layers=4)
        if buffers:
            model.register_buffer("kept", torch.ones(3000))
            model.blocks[0].register_buffer("not_saved", torch.zeros(500, dtype=torch.int64), persistent=False)
    cluster = f"{2 * pipeline.get('stages', 1)}xA100-80"
    batch = zoo.example_batch("gpt-tiny", 16)
    return plan(model, batch, cluster, mesh="x=2", activations=("keep",), time_limit=30, **pipeline)  # type: ignore[arg-type]


def test_every_device_holds_them_whole() -> None:
    without, found = planned(buffers=False), planned(buffers=True)
    assert found.memory.peak_nbytes == without.memory.peak_nbytes + BUFFERS


@pytest.mark.parametrize("interleave", [1, 2])
def test_a_stage_holds_them_once(interleave: int) -> None:
    without, found = (planned(buffers, stages=2, micro_batches=4, interleave=interleave) for buffers in (False, True))
    assert without.schedule is not None
    assert found.schedule is not None
    for one, other in zip(without.schedule.stages, found.schedule.stages, strict=True):
        assert other.memory.peak_nbytes == one.memory.peak_nbytes + BUFFERS
