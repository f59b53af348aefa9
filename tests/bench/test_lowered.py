"""The benchmark of lowered blocks as far as it goes without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.lowered import command

TINY = ["--device", "cpu", "--dim", "32", "--heads", "4", "--ranks", "4", "--seq", "8", "--batch", "2", "--vocab", "64"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_block_by_hand_is_the_lowered_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, so that both do the same work; and a row for each of them."""
    monkeypatch.setattr(command, "WARM_UP", 1)
    monkeypatch.setattr(command, "PASSES", 1)
    path = tmp_path / "found.json"
    command.main([*TINY, "--rounds", "3", "--json", str(path)])
    found = json.loads(path.read_text())
    assert found["time"]["output_difference"] == 0
    assert found["time"]["median_ms"].keys() == {"by hand", "lowered", "lowered, compiled"}
    assert found["machine"]["torch"] == torch.__version__
