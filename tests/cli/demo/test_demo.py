"""The tour of `scrimp demo`: what it prints, what it leaves behind, and that it owns up to a broken promise."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from scrimp.cli._app import app
from scrimp.cli.demo import planned, tour
from scrimp.cli.demo.tour import Outcome
from scrimp.cli.demo.train import Figures, Plain, Setting
from scrimp.cli.render.curve import ROWS, curve
from scrimp.ext.ranks import RankFailure

TINY = Setting(vocab=16, seq=16, dim=32, heads=2, layers=6, batch=4, steps=10)
BYTES = r"[\d,]{6,}"
ROWS_OF_THE_TABLE = (
    rf"device budget +{BYTES} +{BYTES} +{BYTES} *\n",
    rf"peak by ledger +{BYTES} +{BYTES} *\n",
    rf"peak by profiler, one step +{BYTES} +{BYTES} +{BYTES} *\n",
    rf"by ledger in that step +{BYTES} +{BYTES} *\n",
    r"ledger / profiler +[\d.]+% +[\d.]+% *\n",
    r"the budget is kept +over +yes +yes *\n",
    rf"on the host +{BYTES} +{BYTES} *\n",
    rf"up in a step +{BYTES} +{BYTES} *\n +least possible +{BYTES} +{BYTES} *\n",
    rf"down in a step +{BYTES} +{BYTES} *\n +least possible +{BYTES} +{BYTES} *\n",
    r"seconds a step +[\d.]+ +[\d.]+ +[\d.]+ *\n +least, estimated +[\d.]+ +[\d.]+ *\n",
    rf"predicted by the plan +{BYTES} +{BYTES} *\n measured +{BYTES} +{BYTES} *\n",
)
FIGURES = Figures(
    budget_nbytes=1_000_000,
    peak_nbytes=900_000,
    step_peak_nbytes=890_000,
    metered_nbytes=899_000,
    host_nbytes=5_000_000,
    up_nbytes=300_000,
    least_up_nbytes=250_000,
    down_nbytes=200_000,
    least_down_nbytes=200_000,
    seconds=0.2,
    least_seconds=0.1,
)
OUTCOME = Outcome(
    setting=TINY,
    plain=Plain(parameters=100_000, peak_nbytes=3_000_000, seconds=0.1, entropy=1.0, unigram_entropy=2.0),
    first=FIGURES,
    second=FIGURES,
    before={4: 2.0, 5: 1.5},
    after={5: 1.5, 6: 1.25},
)


@pytest.fixture(autouse=True)
def _plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


def scrimp(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == code, result.output
    return result


def folders() -> set[Path]:
    return {*Path(tempfile.gettempdir()).glob("scrimp-demo-*")}


def check_table(text: str) -> None:
    for row in ROWS_OF_THE_TABLE:
        assert re.search(row, text), row


def test_the_tour(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tour, "FULL", TINY)
    before = folders()
    text = scrimp("demo", "--steps", "10", "--seed", "3").output
    assert [*re.findall(r"^(\d)  \w", text, re.MULTILINE)] == ["1", "2", "3", "4", "5", "6"]
    assert "random grammar (seed 3)" in " ".join(text.split())
    assert re.search(rf"plain peak +{BYTES} bytes +OVER, 3\.\d\d times the budget", text)
    saved, killed, equal, of = map(
        int, re.search(r"from (\d+) to (\d+) were .* (\d+) of (\d+) losses", text.replace("\n", " ")).groups()
    )  # type: ignore[union-attr]
    assert (saved, equal) == (6, of)
    assert killed >= 7
    assert of == killed - 5
    assert "^ saved ^ killed" in text
    check_table(text)
    assert "\x1b" not in text
    lines = capfd.readouterr().out
    assert re.search(r"step 1/10  loss \d.* peak .* of ", lines)
    assert re.search(r"step 6/10 .*\n(?s:.*)step 6/10 .*\n(?s:.*)step 10/10 ", lines)
    assert "\x1b" not in lines
    assert folders() <= before


@pytest.mark.full
def test_quiet_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tour, "FULL", TINY)
    text = scrimp("demo", "--steps", "10", "--quiet").output
    check_table(text)
    assert "step " not in text.replace("a step", "").replace("one step", "").replace("that step", "")
    assert capfd.readouterr() == ("", "")


@pytest.mark.full
def test_the_whole_tour() -> None:
    text = scrimp("demo").output
    check_table(text)
    last, floor = map(float, re.search(r"last 10 steps is ([\d.]+),\s+the\s+floor\s+([\d.]+):", text).groups())  # type: ignore[union-attr]
    assert floor < last < 1.2 * floor


KEPT = planned.Ran(name="least memory", planned_nbytes=1000, live_nbytes=1000, workspace_nbytes=0, losses=(2.0, 1.0))


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (OUTCOME, None),
        (
            replace(OUTCOME, first=replace(FIGURES, peak_nbytes=1_000_001)),
            "on two ranks the peak is 1,000,001 bytes by the ledger",
        ),
        (
            replace(OUTCOME, second=replace(FIGURES, metered_nbytes=1_000_001)),
            "resumed the peak is 1,000,001 bytes by the profiler",
        ),
        (replace(OUTCOME, after={5: 1.5000001}), "the loss of step 5 was 1.5 before the kill and 1.5000001 after the resume"),
        (replace(OUTCOME, after={6: 1.0}), "no step was made both before"),
    ],
)
def test_a_broken_promise_is_owned_up_to(monkeypatch: pytest.MonkeyPatch, outcome: Outcome, message: str | None) -> None:
    monkeypatch.setattr(tour, "tour", lambda *args, **kwargs: outcome)
    monkeypatch.setattr(planned, "planned", lambda *args: [KEPT, replace(KEPT, name="DDP")])
    text = scrimp("demo", "--quiet", code=int(message is not None)).output
    assert text.lstrip().startswith("bytes on a rank")
    assert (f"broken promise: {message}" in text) if message else "promise" not in text
    assert "Next:" not in text


def test_ranks_that_do_not_start_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no more processes")

    before = folders()
    monkeypatch.setattr(tour, "RankPool", refuse)
    text = scrimp("demo", code=1).output
    assert text.startswith("error: the demo stopped: 2 processes could not be started or reached (no more processes)")
    assert folders() <= before


class Pool:
    """Of ranks that fail by themselves, before anybody kills them."""

    def run(self, *args: object) -> None:
        raise RankFailure("train", 2, {0: "rank 0 died with exit code -11", 1: "rank 1 died with exit code -9"}, {})


def test_ranks_that_die_otherwise_are_no_kill(tmp_path: Path) -> None:
    run = tour.Run(name="first", folder=str(tmp_path), budget_nbytes=1, measured=4, doomed=True)
    with pytest.raises(RankFailure, match="exit code -11"):
        tour._until_killed(Pool(), TINY, run)  # type: ignore[arg-type]


def test_too_few_steps_are_refused() -> None:
    assert "10" in scrimp("demo", "--steps", "9", code=2).output
    assert (TINY.saved, TINY.killed) == (5, 7)
    assert TINY.rate(0) == pytest.approx(TINY.lr)
    assert 0 < TINY.rate(9) < TINY.lr


def test_the_curve_comes_down_to_its_floor() -> None:
    lines = curve([4.0, 2.0, 1.0, 1.0], 0.0, [(1, "saved"), (3, "killed")])
    assert lines[0] == "  4.00 | *"
    assert lines[ROWS - 1] == "  0.00 | ---- floor"
    assert lines[4] == "       |  *"
    assert lines[6] == "       |   **"
    assert lines[-1].split() == ["^", "saved", "^", "killed"]
    assert len(curve([*range(600)], 0.0)[ROWS]) == 8 + 61
    assert "*" in curve([1.0], 1.0)[0]
