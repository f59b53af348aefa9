"""The benchmark of an engine's start on a model that is too small to say anything about time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.run import start


@pytest.mark.full
def test_both_starts_give_one_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    start.main(["--quick", "--part", "zero-3", "--json", str(path)])
    (part,) = json.loads(path.read_text())["parts"].values()
    assert part[start.COLD]["loss"] == part[start.WARM]["loss"]
    for each in part.values():
        assert each["all"] >= each["engine"] > each["parts"]["capture or cache"] > 0
        assert each["step"] > each["parts"]["gradients"] > each["parts"]["  moves"] > 0
    text = capsys.readouterr().out
    assert "start to first loss" in text
    assert "update" in text
