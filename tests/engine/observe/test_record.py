"""What an engine leaves of a run: the recorded step against the ledger, the predicted step against the recorded one, files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import scrimp
from scrimp import RunError, report, zoo
from scrimp.engine.observe.run_data import run_data, trace_data
from scrimp.ext.ranks import pool
from scrimp.report import Run, read
from scrimp.report.run_view import curves, difference
from tests.report.runs import plan_text, recorded, trained

SETTINGS: list[dict[str, Any]] = [
    {"memory": "1GiB"},
    {"memory": "700KiB"},
    {"memory": "700KiB", "micro_batches": 2},
    {"memory": "720KiB", "activations": "recompute,offload", "clip_norm": 1.0},
    {"memory": "700KiB", "skip_nonfinite": False},
    {"memory": "1MiB", "precision": "fp32"},
]


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_recorded_step_has_the_ledgers_peak_and_what_the_schedule_predicted(name: str, settings: dict[str, Any]) -> None:
    with scrimp.Engine(zoo.build(name), device="cpu", **settings) as engine:
        for step in range(6):
            engine.ledger.reset_peak()
            engine.step(*zoo.example_batch(name, batch=8, step=step))
        timeline = engine._run.metering.recorded
        assert timeline is not None
        totals = timeline.totals
        at = max(range(len(totals)), key=lambda k: totals[k])
        assert totals[at] == engine.ledger.peak_nbytes
        peak = {kind: size for kind, size in engine.ledger.peak.by_kind if size}
        assert {kind: column[at] for kind, column in timeline.kinds.items() if column[at]} == peak
        run = Run(name="run", run=run_data(engine._run, "", ""), trace=trace_data(engine._run))
        measured, predicted = curves(run)
        assert measured is not None
        assert predicted is not None
        assert len(predicted.places) == len(timeline.stages)
        # Of the tracing step: what it had besides weights may differ by a few scalars. An issue allows 5 %.
        assert difference(measured, predicted)[0] < 0.01
        assert [list(stage.resident) for stage in timeline.stages] == [
            stage["resident"] for stage in (run.trace or {})["predicted"]["schedule_steps"]
        ]


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"memory": "600KiB"}, 4),
        ({"memory": "1500KiB", "exchange": "sparse", "activations": "recompute,offload"}, 8),
    ],
    ids=["dense", "sparse"],
)
def test_ranks(tmp_path: Path, settings: dict[str, Any], rows: int, pytestconfig: pytest.Config) -> None:
    """Tiers, recomputation and sparse exchange on 4 ranks: the predicted timeline is within 5 % at every schedule step."""
    if settings.get("exchange") == "sparse":
        settings = {**settings, "exchange": scrimp.Sparse(density=0.1, choose=False)}
    steps = 100 if pytestconfig.getoption("--full") else 10
    found = pool(4).run(recorded, str(tmp_path / "run"), "gpt-tiny", steps, rows, None, settings)
    assert max(error for _, error in found) < 0.05
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "bound.json", "machine.json", "metrics.jsonl", "run.json", "trace.json",
    ]  # fmt: skip
    run = read(tmp_path / "run")
    assert run.run is not None
    assert run.run["settings"]["ranks"] == 4
    counted = [row["received_nbytes"] for row in run.metrics]
    assert len(counted) == steps
    assert min(counted) > 0
    assert sum(counted) <= found[0][0]


def test_a_run_under_a_plan_has_the_plan(tmp_path: Path) -> None:
    found = pool(2).run(recorded, str(tmp_path / "run"), "gpt-tiny", 4, 8, plan_text(), {"memory": "1GiB", "precision": "fp32"})
    assert max(error for _, error in found) < 0.05
    run = read(tmp_path / "run")
    assert run.plan is not None
    assert run.plan["mesh"] == "x=2"
    assert run.trace is not None
    assert "move" in run.trace["measured"]["operators"]
    report.write(tmp_path / "run", tmp_path / "report.html")


def test_a_folder_is_complete_after_a_run_and_readable_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with scrimp.Engine(zoo.build("gpt-tiny"), memory="1GiB", device="cpu") as engine:
        progress = scrimp.Progress(engine, run=folder, quiet=True)
        progress.__enter__()
        for step in range(6):
            progress.update(engine.step(*zoo.example_batch("gpt-tiny", batch=8, step=step)))
            assert read(folder).run is not None  # as if it were killed here
        killed = read(folder)
        assert killed.run is not None
        assert killed.run["ended"] is None
        assert killed.trace is not None
        progress.__exit__(None, None, None)
        ended = read(folder)
        assert ended.run is not None
        assert ended.run["ended"] >= ended.run["began"] == killed.run["began"]
        assert ended.bound is not None
        assert ended.bound["least_seconds"] == engine.bound().least_seconds
        with scrimp.Progress(engine, run=folder, quiet=True) as again:
            again.update(engine.step(*zoo.example_batch("gpt-tiny", batch=8, step=6)))
    assert [row["step"] for row in read(folder).metrics] == [*range(7)]
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_folders_that_are_refused(tmp_path: Path) -> None:
    trained(tmp_path / "other", steps=1, layers=1, memory=scrimp.Memory(device="1GiB"))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    with scrimp.Engine(zoo.build("gpt-tiny"), memory="1GiB", device="cpu") as engine:
        for name, words in (
            ("other", "the run of another model"),
            ("foreign", "it has thesis.tex and no run.json"),
            ("file", "cannot be made: File exists"),
        ):
            with pytest.raises(RunError, match=words), scrimp.Progress(engine, run=tmp_path / name, quiet=True):
                pass
        with pytest.raises(RunError, match="either run or metrics"):
            scrimp.Progress(engine, run=tmp_path / "new", metrics=tmp_path / "m.jsonl")
    assert not (tmp_path / "new").exists()


def test_a_report_of_an_engine(tmp_path: Path) -> None:
    path = tmp_path / "engine.html"
    with scrimp.Engine(zoo.build("gpt-tiny"), memory="1GiB", device="cpu") as engine:
        engine.report(path)  # before the first step: panels say what is missing
        assert "No step was recorded" in path.read_text()
        for step in range(4):
            engine.step(*zoo.example_batch("gpt-tiny", batch=8, step=step))
        engine.report(path)
        assert "No metrics are known" in path.read_text()
        assert "memory-chart" in path.read_text()
        before = path.read_bytes()
        with pytest.raises(RunError, match="cannot be written"):
            engine.report(tmp_path / "no" / "such" / "folder.html")
        with pytest.raises(RunError, match=r"this is None version None, but this scrimp reads scrimp\.rehearsal"):
            engine.report(path, rehearsal={"points": []})
        assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["engine.html"]


def test_a_full_disk_ends_the_recording_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RunError("run.json cannot be written: No space left on device")

    with scrimp.Engine(zoo.build("gpt-tiny"), memory="1GiB", device="cpu") as engine:
        progress = scrimp.Progress(engine, run=tmp_path / "run", quiet=True).__enter__()
        monkeypatch.setattr("scrimp.report.run_folder.replace_text", full)
        progress.update(engine.step(*zoo.example_batch("gpt-tiny", batch=8, step=0)))
        with pytest.warns(UserWarning, match="No space left on device; the run folder lacks this file"):
            progress.__exit__(None, None, None)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["ended"] is None
