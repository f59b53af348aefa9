"""`scrimp report` and `scrimp compare`: files, tables, refusals, the examples of their help, and that they need no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from scrimp.cli._app import app
from tests.report.runs import plan_text, rehearsal, trained
from tests.report.test_tensorboard import scalars


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    trained(made / "run", steps=4)
    (made / "plan.json").write_text(plan_text())
    (made / "kept.json").write_text(plan_text(activations="keep"))
    (made / "rehearsal.json").write_text(json.dumps(rehearsal()))
    return made


def scrimp(*words: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


def test_a_report_with_events(folder: Path, tmp_path: Path) -> None:
    out, events = tmp_path / "report.html", tmp_path / "events"
    said = scrimp(
        "report", folder / "run", "-o", out, "--plan", folder / "plan.json", "--rehearsal", folder / "rehearsal.json",
        "--tensorboard", events,
    )  # fmt: skip
    (written,) = events.iterdir()
    assert said.output.split() == ["written", "to", str(out), "written", "to", str(written)]
    text = out.read_text()
    assert "blocks.3 aten.mm" in text
    assert "x=2" in text
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step for _, step, _ in scalars(written)[1]] == [row["step"] for row in rows]
    assert [values["loss"] for _, _, values in scalars(written)[1]] == pytest.approx([row["loss"] for row in rows], rel=2**-23)


def test_a_comparison_on_the_terminal(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "compare.html"
    text = scrimp("compare", folder / "run", folder / "plan.json", folder / "kept.json", "-o", out).output
    peaks = [json.loads((folder / name).read_text())["memory"]["peak_nbytes"] for name in ("plan.json", "kept.json")]
    assert re.search(rf"planned peak +\S +{peaks[0] / 1024:.1f} KiB +{peaks[1] / 1024:.1f} KiB", text)
    assert re.search(r"^ +run +plan +kept$", text, re.MULTILINE)
    assert out.exists()
    assert scrimp("compare", folder / "plan.json", folder / "kept.json").output.count("planned step") == 1


def test_wrong_input(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text((folder / "plan.json").read_text()[:500])
    (tmp_path / "other.json").write_text((folder / "plan.json").read_text().replace("blocks.0.", "layers.0."))
    out = tmp_path / "out.html"
    for words, told in (
        (("report", tmp_path / "none", "-o", out), "there is no"),
        (("report", tmp_path / "cut.json", "-o", out), "cut.json is not a plan file of scrimp, or it is truncated"),
        (("report", folder / "run", "-o", tmp_path / "no" / "r.html"), "there is no folder"),
        (("report", folder / "run", "-o", tmp_path), "is a folder; give the name of a file"),
        (("report", folder / "run", "-o", out, "--plan", tmp_path / "other.json"), "the plan is of another model than the run"),
        (("report", folder / "plan.json", "-o", out, "--tensorboard", tmp_path / "tb"), "'plan' has no metrics"),
        (("report", folder / "run", "-o", out, "--rehearsal", folder / "plan.json"), "this is scrimp.plan version 2"),
        (("compare", folder / "run", "-o", out), "two or more"),
        (("compare", folder / "run", tmp_path / "cut.json", "-o", out), "truncated"),
    ):
        said = scrimp(*words, code=2)
        assert told in " ".join(said.output.split()), said.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.json", "other.json"]


@pytest.mark.parametrize("command", ["report", "compare"])
def test_the_examples_of_the_help_work(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = scrimp(command, "--help").output
    examples = re.findall(r"^ +scrimp ((?:plan|report|compare) .*?) *$", text.partition("Examples")[2], re.MULTILINE)
    assert len(examples) >= 2
    monkeypatch.chdir(tmp_path)
    for example in examples:
        scrimp(*example.split())
    assert (tmp_path / {"report": "plan.html", "compare": "compare.html"}[command]).exists()


def test_no_torch_is_needed(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys, scrimp.cli\n"
        f"sys.argv = ['scrimp', 'compare', {str(folder / 'run')!r}, {str(folder / 'plan.json')!r}, '-o', 'c.html']\n"
        "try:\n    scrimp.cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)


def test_a_plan_with_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scrimp("plan", "gpt-tiny", "--cluster", "2xCPU", "--mesh", "x=2", "--time-limit", "3", "--report", "p.html")
    text = (tmp_path / "p.html").read_text()
    assert "Prices of the next best choices" in text
    assert "Pareto front" in text
    said = scrimp("plan", "gpt-tiny", "--cluster", "2xCPU", "--report", "no/p.html", code=2)
    assert "--report no/p.html: there is no folder no" in said.output
