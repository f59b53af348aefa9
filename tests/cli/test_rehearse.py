"""`scrimp rehearse`: the examples of its help, JSON, and wrong arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scrimp.rehearsal import Rehearsal
from tests.cli.test_cli import scrimp


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def examples() -> list[list[str]]:
    text = scrimp("rehearse", "--help").output
    return [line.split() for line in re.findall(r"^ +scrimp ((?:plan|rehearse) .*?) *$", text, re.M)]


def test_examples_of_the_help_work(here: Path) -> None:
    first, *others = examples()
    assert len(others) == 4
    scrimp(*first, "--time-limit", "2")
    texts = {" ".join(words[2:]): scrimp(*words).output for words in others}
    assert "peak" in texts[""]
    assert "blocks.0, forward" in texts[""]
    assert "not measured" in texts[""]
    assert re.search(r"^ranks +rehearsed", texts["--rank all"], re.M)
    assert "s measured" in texts["--rank 3 --on cpu"]
    found = Rehearsal.from_json(texts["--json"])
    assert max(found.totals) == found.peak.nbytes
    assert f"{found.peak.nbytes / found.planned_nbytes:.4f} of the plan's" in texts[""]
    assert max(map(len, texts[""].splitlines())) < 200


def test_the_file_has_what_is_printed_and_wrong_arguments_are_named(here: Path) -> None:
    scrimp("plan", "gpt-tiny", "--cluster", "2xCPU", "--mesh", "x=2", "--batch", "8", "--time-limit", "2", "--out", "plan.json")
    scrimp("rehearse", "plan.json", "--rank", "all", "--out", "all.json")
    every = [Rehearsal.from_json(json.dumps(each)) for each in json.loads((here / "all.json").read_text())]
    assert sorted(rank for each in every for rank in each.ranks) == [0, 1]
    for words, said in (
        (["--rank", "2"], "the plan is for 2 ranks: give 0 to 1, or all"),
        (["--rank", "first"], "give 0 to 1, or all"),
        (["--on", "tpu"], "meta, cpu or cuda"),
        (["--out", "no/folder.json"], "there is no folder no"),
        (["--set", "colour=3"], "colour"),
    ):
        assert said in scrimp("rehearse", "plan.json", *words, code=2).output
    assert "plan this model" in scrimp("rehearse", "plan.json", "--model", "llama-tiny", "--batch", "8", code=1).output
    assert "has the shape" in scrimp("rehearse", "plan.json", "--batch", "16", code=1).output
    assert "cannot be read" in scrimp("rehearse", "none.json", code=2).output
    (here / "other.json").write_text("{}")
    assert "other.json" in scrimp("rehearse", "other.json", code=2).output
    plan = json.loads((here / "plan.json").read_text())
    plan["model"]["name"] = ""
    (here / "nameless.json").write_text(json.dumps(plan))
    assert "give --model" in scrimp("rehearse", "nameless.json", code=2).output
    assert not (here / "no").exists()
