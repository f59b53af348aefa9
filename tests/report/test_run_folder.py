"""Run folders and plan files that are truncated, foreign, of another version or model: clear errors, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scrimp import PlanError, RunError, ScrimpError, report
from scrimp.report.files import replace_text
from tests.report.runs import plan_text, rehearsal, trained

Damage = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = trained(tmp_path_factory.mktemp("runs") / "good", steps=6)
    (folder / "plan.json").write_text(plan_text())
    (folder / "rehearsal.json").write_text(json.dumps(rehearsal()))
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run"))


def refused(folder: Path, words: str, kind: type[ScrimpError] = RunError) -> None:
    """The report is refused, and the target is as it was."""
    target = folder.parent / "report.html"
    target.write_text("as before")
    with pytest.raises(kind, match=words):
        report.write(folder, target)
    assert target.read_text() == "as before"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["report.html", "run"]


FILES = ["run.json", "machine.json", "trace.json", "bound.json", "plan.json", "rehearsal.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
def test_truncated_files(folder: Path, name: str, part: float) -> None:
    text = (folder / name).read_text()
    (folder / name).write_text(text[: int(len(text) * part)])
    refused(folder, rf"{name} is not .*, or it is truncated", PlanError if name == "plan.json" else RunError)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "holds a list, not an object"),
        ('"hello"', "holds a str"),
        ("{}", "this is None version None, but this scrimp reads scrimp"),
        ('{"format": "chrome.trace", "version": 1, "traceEvents": []}', r"this is chrome\.trace version 1"),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1") + "\0", "is not"),
    ],
)
def test_foreign_files(folder: Path, name: str, text: str, words: str) -> None:
    (folder / name).write_text(text)
    refused(folder, words, PlanError if name == "plan.json" else RunError)


@pytest.mark.parametrize("name", FILES)
def test_other_versions(folder: Path, name: str) -> None:
    data = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**data, "version": 99}))
    refused(folder, rf"{name}: this is {data['format']} version 99, but", PlanError if name == "plan.json" else RunError)


def _other_layers(data: dict[str, Any]) -> None:
    data["measured"]["schedule_steps"][0]["resident"] = [99]


def _short_column(data: dict[str, Any]) -> None:
    data["measured"]["kinds"]["parameters"].pop()


def _negative(data: dict[str, Any]) -> None:
    data["measured"]["kinds"]["parameters"][0] = -1


def _no_operator(data: dict[str, Any]) -> None:
    data["measured"]["operators"].clear()


def _short_prediction(data: dict[str, Any]) -> None:
    data["predicted"]["schedule_steps"].pop()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_other_layers, "of another model: it names layers that the run's 6 do not have"),
        (_short_column, "is damaged: 'parameters' has"),
        (_negative, "is damaged: 'parameters'"),
        (_no_operator, r"trace\.json is not a trace of scrimp, or it is damaged: IndexError"),
        (_short_prediction, "is damaged"),
        (lambda data: data.update(measured=[]), "is not a trace of scrimp"),
        (lambda data: data.pop("measured"), "it has no 'measured'"),
    ],
)
def test_damaged_traces(folder: Path, damage: Damage, words: str) -> None:
    data = json.loads((folder / "trace.json").read_text())
    damage(data)
    (folder / "trace.json").write_text(json.dumps(data))
    refused(folder, words)


@pytest.mark.parametrize("name", ["run.json", "bound.json", "plan.json", "machine.json"])
def test_every_missing_field_is_told(folder: Path, name: str) -> None:
    """Whatever is taken out of a file, the report is written or refused with an error of scrimp's."""
    data = json.loads((folder / name).read_text())
    target = folder.parent / "report.html"
    for key in data:
        (folder / name).write_text(json.dumps({k: v for k, v in data.items() if k != key}))
        told = ""
        try:
            report.write(folder, target)
        except ScrimpError as error:
            told = str(error)
        assert target.exists() or key in told or name in told, told
        target.unlink(missing_ok=True)


def test_a_plan_of_another_model(folder: Path, tmp_path: Path) -> None:
    data = json.loads(plan_text())
    data["layers"][1]["weights"][0]["name"] = "encoder.0.weight"
    (tmp_path / "other.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"of another model than the run 'run': it has the weight 'encoder\.0\.weight'"):
        report.write(folder, tmp_path / "report.html", plan=tmp_path / "other.json")
    assert not (tmp_path / "report.html").exists()


def test_metrics_of_another_program(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("epoch,loss\n1,2\n")
    refused(folder, "is no line of a metrics file")


@pytest.mark.parametrize("path", ["nothing", "empty"])
def test_paths_without_a_run(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"there is no .*nothing|is not a run folder: it has no run\.json"):
        report.write(tmp_path / path, tmp_path / "report.html")


def test_targets_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    for target in (tmp_path / "no" / "report.html", tmp_path / "folder.html"):
        with pytest.raises(RunError, match="cannot be written"):
            report.write(folder, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.html", "run"]


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    replace_text(path, "old")

    def broken(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(RunError, match="No space left on device"):
        replace_text(path, "new")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_a_report_is_an_ordinary_file(folder: Path, tmp_path: Path) -> None:
    report.write(folder, tmp_path / "report.html")
    (tmp_path / "plain").touch()
    assert (tmp_path / "report.html").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_run_that_has_only_begun(folder: Path, tmp_path: Path) -> None:
    """Every panel is there, and says what is missing."""
    for path in folder.iterdir():
        if path.name != "run.json":
            path.unlink()
    report.write(folder, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    for words in ("follows no plan", "No step was recorded", "No bound is known", "No metrics are known", "No machine is known"):
        assert words in text
