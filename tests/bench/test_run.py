"""The benchmark of planned steps on a model that is too small to say anything about time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.network.netns import missing
from bench.run import command

LOSSES = {"scrimp": [2.0, 1.0], "DTensor": [2.0, 1.0001]}


def test_the_ways_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    command.main(["--quick", "--json", str(path)])
    parts = json.loads(path.read_text())["parts"]
    assert {way: [*part["seconds"]] for way, part in parts.items()} == {
        "tp": ["scrimp", "DTensor"],
        "zero-3": ["scrimp", "FSDP2"],
    }
    assert all(part["largest_difference"] <= command.SAME for part in parts.values())
    assert "zero-3: the same first loss" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.skipif(missing() is not None, reason="no network namespaces here")
def test_the_ways_train_alike_over_links(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command.main(["--quick", "--part", "zero-3", "--ranks", "2", "--mbit", "1000", "--json", str(path)])
    (part,) = json.loads(path.read_text())["parts"].values()
    assert part["largest_difference"] <= command.SAME


def test_a_ratio_is_of_steps_in_the_same_round() -> None:
    seconds = {"scrimp": [1.0, 10.0, 2.0], "DTensor": [2.0, 30.0, 8.0]}
    part = command.summary({"losses": LOSSES, "seconds": seconds, "nbytes": {"scrimp": 1e6, "DTensor": 0}}, "DTensor")
    assert part["to_scrimp"] == {"scrimp": 1.0, "DTensor": 3.0}
    assert part["first_difference"] == 0
    assert part["largest_difference"] == pytest.approx(1e-4)
    text = command.table({"tp": part, "zero-3": {**part, "first_difference": 1e-3}})
    assert "tp: the same first loss" in text
    assert "zero-3: NOT THE SAME first loss" in text
    assert "unknown" in text
