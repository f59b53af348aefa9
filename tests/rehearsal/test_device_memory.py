"""What a rehearsal on a GPU takes of it: storages, workspace, rounding, fragmentation, and what is outside the allocator."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from scrimp import ScrimpError, plan, rehearse, zoo
from scrimp.rehearsal import DeviceMemory, Rehearsal
from tests.run import models
from tests.run.plans import plan_of

MIB = 1 << 20
SEEN = DeviceMemory(
    live_nbytes=100 * MIB, requested_nbytes=110 * MIB, allocated_nbytes=112 * MIB, reserved_nbytes=120 * MIB,
    outside_nbytes=500 * MIB,
)  # fmt: skip


def test_the_parts_add_up() -> None:
    parts = (SEEN.live_nbytes, SEEN.workspace_nbytes, SEEN.rounding_nbytes, SEEN.fragmentation_nbytes)
    assert parts == (100 * MIB, 10 * MIB, 2 * MIB, 8 * MIB)
    assert sum(parts) == SEEN.reserved_nbytes
    assert SEEN.shares == (0.02, 0.08)


def test_it_is_in_the_text_and_in_the_file() -> None:
    plain = rehearse(
        plan_of("gpt-tiny", "x=2,y=2", "least"), models.build("gpt-tiny"), zoo.example_batch("gpt-tiny", models.ROWS)
    )
    assert plain.device_memory is None
    found = replace(plain, on="cuda", device_memory=SEEN)
    assert Rehearsal.from_json(found.to_json()) == found
    line = next(line for line in found.summary().splitlines() if line.startswith("device "))
    for words in ("120.0 MiB reserved", "10.0 MiB of workspace", "8.0 MiB of fragmentation", "500.0 MiB outside the allocator"):
        assert words in line
    assert "device " not in plain.summary()
    old = {**json.loads(plain.to_json()), "version": 1}
    with pytest.raises(ScrimpError, match=r"version 1, but this scrimp reads scrimp\.rehearsal version 2"):
        Rehearsal.from_json(json.dumps(old))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    model, batch = zoo.build("gpt-tiny", layers=2), zoo.example_batch("gpt-tiny", batch=16)
    made = plan(model, batch, "2xA100-80", mesh="x=2", time_limit=2)
    seen = rehearse(made, model, batch, on="cuda").device_memory
    assert seen is not None
    assert 0 < seen.live_nbytes <= seen.requested_nbytes <= seen.allocated_nbytes <= seen.reserved_nbytes
    assert seen.outside_nbytes > 50 * MIB
