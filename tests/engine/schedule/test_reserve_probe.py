"""The probe of what a device needs beside a plan: its figures, its calls on a CPU, and all of it on a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from scrimp import Cluster
from scrimp.engine.schedule import reserve_probe
from scrimp.engine.schedule.reserve_probe import families, reserve_of

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_a_cpu_needs_nothing() -> None:
    assert Cluster.probe("cpu", reserve=True).reserve is None


def test_figures_follow_from_what_was_observed() -> None:
    observed = {
        "outside, first kernel": 300, "block": 512, "workspace of a matmul, bfloat16": 10, "workspace of attention, bfloat16": 40,
        "kept": 32, "outside, all kernels loaded": 500,
    }  # fmt: skip
    found = reserve_of("some GPU", "2.12", observed)
    assert (found.context_nbytes, found.workspace_nbytes, found.block_nbytes) == (500, 72, 512)
    assert (found.device, found.torch, found.measured) == ("some GPU", "2.12", ("context", "workspace"))
    assert dict(found.observed) == observed
    assert found.nccl_connection_nbytes > 0  # an estimate


def test_every_family_runs_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"ROWS": 8, "HEADS": 2, "TOKENS": 4, "HEAD_DIM": 8, "BATCH": 2, "CHANNELS": 3, "PIXELS": 5}.items():
        monkeypatch.setattr(reserve_probe, name, size)
    state = torch.get_rng_state()
    every = families()
    assert len({family.name for family in every}) == len(every) == 16
    for family in every:
        inputs = family.make(torch.device("cpu"))
        made = family.run(*inputs)
        assert len(made) == (2 + len(inputs) if "backward" in family.name else 1)
        assert {each.dtype for each in made} == {inputs[0].dtype}
        assert family.name.startswith(("a ", "attention"))
    assert torch.equal(torch.get_rng_state(), state)


def test_storages_are_counted_once_and_in_whole_blocks() -> None:
    one = torch.zeros(100, dtype=torch.uint8)
    assert reserve_probe._nbytes((one, one[:50], torch.zeros(129))) == 512 + 1024


@pytest.mark.parametrize("gpu", [pytest.param("cuda", marks=GPU)])
def test_on_a_gpu(gpu: str) -> None:
    found = Cluster.probe(gpu, reserve=True).reserve
    assert found is not None
    assert found.measured == ("context", "workspace")
    assert 100 << 20 < found.context_nbytes < 4 << 30
    assert 0 < found.workspace_nbytes < 4 << 30
    assert found.block_nbytes == 512
    observed = dict(found.observed)
    assert observed["most above whole blocks"] >= 0
    assert observed["outside, first kernel"] <= observed["outside, all kernels loaded"]
    cluster = Cluster.preset("8xH200").with_reserve(found)
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert json.loads(cluster.to_json())["version"] == 4
