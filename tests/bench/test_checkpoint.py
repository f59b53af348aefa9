"""The benchmark of saves on a model that is too small to say anything about time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.checkpoint import command, export


def test_saves_run_beside_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    command.main(["--quick", "--json", str(path), "--folder", str(tmp_path)])
    (row,) = json.loads(path.read_text())["rounds"]
    assert row["nbytes"] > 12 * row["parameters"]
    assert row["steps"] >= 1
    assert row["added_seconds"] == pytest.approx(row["steps_beside_seconds"] - row["steps_alone_seconds"])
    assert row["share"] == pytest.approx(row["added_seconds"] / row["save_seconds"])
    assert "a save in the background" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == ["found.json"]


def test_an_export_is_metered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    export.main(["--blocks", "1", "--dim", "32", "--vocab", "64", "--json", str(path), "--folder", str(tmp_path)])
    found = json.loads(path.read_text())
    assert found["parameters"] > 10_000
    assert 0 <= found["more_nbytes"] < found["at_rest_nbytes"]
    assert "MiB resident above" in capsys.readouterr().out
