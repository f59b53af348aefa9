"""The preflight: needs by formula, every refusal with needed and free bytes and a remedy, and what it reads."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import scrimp
from scrimp import zoo
from scrimp.errors import FitError, RunError
from scrimp.train.preflight.check import findings, line, refuse
from scrimp.train.preflight.machine import Machine, machine_of, port_is_free, write_rate
from scrimp.train.preflight.needs import SHM_OF_RANK, Shape, needs_of, numels

GIB = 1 << 30
SHAPE = Shape(
    world=1, here=1, device_nbytes=0, host_nbytes=64 * GIB, cuda=False, replicated=False, disk=False, saves=4, keep=2, there=0
)
MACHINE = Machine(torch="2.13.0+cu130", host_nbytes=64 * GIB, shm_nbytes=GIB, run_nbytes=500 * GIB)
N = 10**9


@pytest.mark.parametrize(
    ("optimizer", "precision", "nbytes"),
    [
        (scrimp.AdamW(), "bf16", 2 + 4 + 8), (scrimp.AdamW(), "fp32", 4 + 8), (scrimp.SGD(), "bf16", 2 + 4),
        (scrimp.SGD(momentum=0.9), "bf16", 2 + 4 + 4),
    ],
)  # fmt: skip
def test_bytes_of_a_parameter(optimizer: Any, precision: str, nbytes: int) -> None:
    needs = needs_of(N, N, precision, optimizer, SHAPE)
    assert needs.model_nbytes == needs.host_nbytes == needs.checkpoint_nbytes == nbytes * N
    assert needs.run_nbytes == 3 * nbytes * N  # two that are kept, and a new one


def test_needs_follow_ranks_devices_and_disk() -> None:
    def needs(**changes: Any) -> Any:
        return needs_of(N, N, "bf16", scrimp.AdamW(), replace(SHAPE, **changes))

    assert needs(world=8, here=4).host_nbytes == 7 * N
    assert needs(world=8, here=4, replicated=True).host_nbytes == 56 * N
    assert needs(device_nbytes=4 * N, cuda=True).host_nbytes == 10 * N
    assert needs(device_nbytes=20 * N, cuda=True).host_nbytes == 0
    assert needs(world=4, here=4, cuda=True).shm_nbytes == 4 * SHM_OF_RANK
    assert needs(world=4, here=4).shm_nbytes == 0
    tier = needs(disk=True, host_nbytes=5 * N)
    assert (tier.host_nbytes, tier.tier_nbytes) == (2 * N, 9 * N)
    assert needs(there=2).run_nbytes == 14 * N
    assert needs(saves=1).run_nbytes == 14 * N
    frozen = needs_of(N, N // 10, "bf16", scrimp.AdamW(), SHAPE)
    assert frozen.model_nbytes == 2 * N + 12 * N // 10


def test_a_tied_parameter_counts_once() -> None:
    model = zoo.build("gpt-tiny")
    assert numels(model)[0] == sum(each.numel() for each in {*model.parameters()})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"host_nbytes": 13 * GIB}, FitError, r"host memory needs 13.0 GiB or more, 13.0 GiB free: .*\[memory\] disk"),
        ({"host_nbytes": 8 * GIB}, FitError, r"host memory needs 13.0 GiB or more, 8.0 GiB free"),
        (
            {"run_nbytes": 20 * GIB},
            FitError,
            r"disk for checkpoints, 13.0 GiB each needs 39.1 GiB or more, 20.0 GiB free: free space",
        ),
        ({"torch": "2.9.1"}, RunError, r"torch 2.9.1, at least 2.11: pip install 'torch>=2.11'"),
        ({"tier_nbytes": GIB, "same_disk": False}, FitError, r"disk tier needs 8.4 GiB or more, 1.0 GiB free: .*\[memory\] disk"),
    ],
)
def test_refusals_name_both_sides_and_a_remedy(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    disk = "tier_nbytes" in changes
    needs = needs_of(N, N, "bf16", scrimp.AdamW(), replace(SHAPE, disk=disk, host_nbytes=5 * N if disk else 64 * GIB))
    found = findings(needs, replace(MACHINE, **changes), saving=True, launching=False)
    with pytest.raises(error, match=words):
        refuse(found)
    assert all("[ok]" in line(each) or each.good is False for each in found)
    refuse(findings(needs, replace(MACHINE, tier_nbytes=GIB * 100 if disk else None), saving=True, launching=False))


def test_shared_memory_of_a_container() -> None:
    needs = needs_of(N, N, "bf16", scrimp.AdamW(), replace(SHAPE, world=8, here=8, cuda=True, device_nbytes=80 * GIB))
    with pytest.raises(
        FitError, match=r"/dev/shm needs 256.0 MiB or more, 64.0 MiB free: start the container with --shm-size=1g"
    ):
        refuse(findings(needs, replace(MACHINE, shm_nbytes=64 << 20), saving=True, launching=False))


def test_warnings_do_not_refuse() -> None:
    needs = needs_of(N, N, "bf16", scrimp.AdamW(), SHAPE)
    machine = replace(MACHINE, tier_nbytes=100 * GIB, tier_rate=50e6, port=29500, port_free=False)
    found = findings(needs, machine, saving=True, launching=True)
    refuse(found)
    told = [line(each) for each in found]
    assert any(re.fullmatch(r"disk tier, written: 50 MB/s \[warning\]; .* \[memory\] disk", each) for each in told)
    assert any(re.fullmatch(r"port: 29500 is in use \[warning\]; start with torchrun --standalone .*", each) for each in told)


def test_what_the_machine_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not port_is_free(port)
        monkeypatch.setenv("MASTER_PORT", str(port))
        found = machine_of(tmp_path / "not" / "yet", tmp_path / "tier", measure=True)
    assert (found.port, found.port_free, found.same_disk) == (port, False, True)
    assert found.host_nbytes > 0
    assert found.run_nbytes > 0
    assert found.tier_rate is not None
    assert found.tier_rate > 0
    assert not [*tmp_path.iterdir()]
    assert write_rate(tmp_path / "no such folder") is None
