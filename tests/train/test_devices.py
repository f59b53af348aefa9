"""The cluster of a run, the rate of a GPU, and the FLOPs of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scrimp import zoo
from scrimp.cluster import KINDS, Cluster
from scrimp.errors import RunError
from scrimp.train.devices import NAMES, cluster_of, devices_of, kind_of_device, rate_of
from scrimp.train.flops import flops_of
from scrimp.train.ranks import join

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80"), ("NVIDIA A100 80GB PCIe", "A100-80"), ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA B200", "B200"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("NVIDIA L40S", "L40S"), ("NVIDIA GeForce RTX 4090", "RTX4090"), ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA GB200", None),
    ],
)  # fmt: skip
def test_kinds_by_the_names_that_torch_gives(name: str, kind: str | None) -> None:
    assert kind_of_device(name) == kind


def test_clusters_by_name_file_and_ranks(tmp_path: Path) -> None:
    assert {kind for _, kind in NAMES} <= {*KINDS}
    (tmp_path / "own.toml").write_text('nodes = 2\ndevices_per_node = 3\nkind = "24GiB"')
    for name, devices in (("16xH100", 16), (str(tmp_path / "own.toml"), 6)):
        found = devices_of(name, CPU, world=1, here=1)
        assert found is not None
        assert found.hardware == cluster_of(name).hardware
        assert found.hardware is not None
        assert found.hardware.devices == devices
    assert devices_of("auto", CPU, world=3, here=3) == Cluster.preset("3xCPU")
    assert rate_of("auto", CPU, "bf16") is None


def test_ranks_on_gpus_are_a_cluster_of_their_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = devices_of("auto", torch.device("cuda"), world=8, here=4)
    assert found is not None
    assert found.hardware is not None
    assert (found.hardware.kind, found.hardware.nodes, found.hardware.devices_per_node) == ("H100", 2, 4)
    assert found.default == found.hardware.between_link
    assert rate_of("auto", torch.device("cuda"), "bf16") == found.hardware.bf16_flops
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Unheard of")
    assert rate_of("auto", torch.device("cuda"), "bf16") is None


def test_flops_of_a_gpt() -> None:
    """Forward: two for each weight and token in matrices, and attention over all pairs of tokens; backward: twice as many."""
    model = zoo.build("gpt-tiny", vocab=64, seq=32, dim=32, heads=4, layers=2)
    sample = tuple(each[0] for each in zoo.example_batch("gpt-tiny", batch=1))
    matrices = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 128) + 32 * 64
    attention = 2 * 2 * (2 * 32 * 32 * 32)
    found = flops_of(model, sample)
    assert found is not None
    assert found >= 3 * 2 * matrices * 32
    assert found <= 3 * 2 * matrices * 32 + 4 * attention  # a fused backward computes the scores again
    assert flops_of(torch.nn.Linear(2, 2), (torch.ones(2),)) is None  # no scalar loss


def test_ranks_that_do_not_meet_say_where(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "no port"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=r"rank 1 of 2 did not meet the others at localhost:no port: .*--rdzv-endpoint HOST:PORT"):
        join("cpu")
