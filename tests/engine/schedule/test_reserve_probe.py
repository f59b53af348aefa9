"""The probe of what a device needs beside a plan: its figures, its calls on a CPU, and all of it on a GPU."""

from __future__ import annotations

import json
import subprocess

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


SMALL = {"ROWS": 8, "HEADS": 2, "TOKENS": 4, "HEAD_DIM": 8, "BATCH": 2, "CHANNELS": 3, "PIXELS": 5}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SMALL.items():
        monkeypatch.setattr(reserve_probe, name, size)


@pytest.mark.usefixtures("small")
def test_every_family_runs_both_ways() -> None:
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


class Counters:
    """In place of torch's counters: every call finds 100 bytes more used by the driver, and the same allocated."""

    def __init__(self) -> None:
        self.used = 1000

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        self.used += 100
        return 10_000 - self.used, 10_000

    def constant(self, device: torch.device | None = None) -> int:
        return 512


@pytest.mark.usefixtures("small")
def test_what_is_read_gives_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters()
    monkeypatch.setattr(torch.cuda, "mem_get_info", counters.mem_get_info)
    for name in ("memory_reserved", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, counters.constant)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(reserve_probe, "_blocks", lambda device: {"block": 512})
    observed = reserve_probe.measure(torch.device("cpu"), 500)
    assert observed["outside, first kernel"] == 1000 + 2 * 100 - 512 - 500
    assert observed["outside, all kernels loaded"] == counters.used - 512 - 500
    assert observed["kept"] == 0
    found = reserve_of("some", "2.12", observed)
    assert found.workspace_nbytes == 0
    assert found.context_nbytes == observed["outside, all kernels loaded"]


def test_a_child_that_fails_is_told_and_this_process_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this device no child can measure: it has no CUDA."""
    monkeypatch.setattr(reserve_probe, "_used", lambda device: 7)
    monkeypatch.setattr(reserve_probe, "measure", lambda device, before: {"before": before})
    with pytest.warns(RuntimeWarning, match="cpu: no child process could measure the context"):
        assert reserve_probe._observed(torch.device("cpu")) == {"before": 0}


def test_a_childs_figures_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    used = iter((70, 75))
    monkeypatch.setattr(reserve_probe, "_used", lambda device: next(used))

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:] == ["-m", "scrimp.engine.schedule.reserve_probe", "cuda:1", "70"]
        return subprocess.CompletedProcess(command, 0, stdout='a word of torch\n{"kept": 3}\n')

    monkeypatch.setattr(subprocess, "run", run)
    assert reserve_probe._observed(torch.device("cuda:1")) == {"kept": 3, "change of other processes": 5}


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
