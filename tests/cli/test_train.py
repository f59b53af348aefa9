"""`scrimp train` and `scrimp top`: exit codes, messages, the examples of their help, and what needs no torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scrimp.cli.training.commands import spelled
from tests.cli.test_cli import scrimp
from tests.train.runs import figures, losses, run, written

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


@contextmanager
def started(*words: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive its block."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, *words], cwd=cwd, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def after_step(folder: Path, step: int, process: subprocess.Popen[str], seconds: float = 90) -> None:
    """Waits until a run has recorded a step."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        file = folder / "metrics.jsonl"
        if file.exists() and file.read_text().count("\n") > step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step} in {folder} within {seconds:g} s; exit code {process.poll()}")


def test_the_examples_of_the_help_work(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one process; `test_examples.py` runs the one of torchrun."""
    monkeypatch.setenv("COLUMNS", "200")
    text = scrimp("train", "--help").output + scrimp("top", "--help").output
    examples = re.findall(r"^ +scrimp ((?:train|top) .*?) *$", text, re.MULTILINE)
    assert len(examples) == 5
    shutil.copytree(ROOT / "examples", here / "examples")
    gpt = here / "examples" / "gpt.toml"
    gpt.write_text(re.sub(r"settings = .*", "settings = { vocab = 256, seq = 32, dim = 32, heads = 2 }", gpt.read_text()))
    said = [scrimp(*example.split()).output for example in examples[:4]]
    assert "predicted peak of a device" in said[0]
    assert "done: 20 steps" in said[1]
    assert "resumed from" in said[2]
    assert "done: 30 steps" in said[2]
    assert re.match(r"step 30/30 +loss [\d.]+ +", said[3])
    ended_run = json.loads((here / "short" / "run.json").read_text())
    assert ended_run["ended"]
    assert f"the run ended at {ended_run['ended']}" in scrimp(*examples[4].split()).output


def test_origins_are_printed_and_wrong_input_is_one_line(here: Path) -> None:
    config = written(here)
    text = scrimp(
        "train", str(config), "--set", "train.steps=2", "--set", "validation.every=0", "--set", "validation.batches=8"
    ).output
    assert re.search(r"^steps = 2 +# --set$", text, re.M)
    assert re.search(r"^batch = 4 +# config.toml$", text, re.M)
    assert re.search(r"^seed = 0 +# default$", text, re.M)
    assert re.search(r"^data: [\d,]+ samples to train on$", text, re.M)
    assert re.search(r"^host memory: needs .* free \[ok\]$", text, re.M)
    assert "done: 2 steps" in text
    for words, told in (
        ((str(config), "--set", "train.stepz=2"), "[train] has no key 'stepz'; did you mean 'steps'?"),
        (("none.toml",), "there is no none.toml"),
        ((str(here),), "is a folder: give a configuration, or --resume for a run folder"),
        ((str(here), "--resume"), "has no run.json: it is no folder of scrimp train"),
        ((str(config), "--resume", "--resume-auto"), "give one of them"),
        ((str(config), "--resume", "--dry-run"), "nothing to resume"),
    ):
        wrong = scrimp("train", *words, code=2)
        assert told in wrong.stderr
        assert wrong.stderr.count("\n") == 1
    assert "has a run: go on with it by scrimp train --resume" in scrimp("train", str(config), code=1).stderr


def test_a_run_folder_resumes_where_it_was_moved(here: Path) -> None:
    config = written(here)
    scrimp("train", str(config), "--quiet", "--set", "train.steps=2")
    (here / "run").rename(here / "moved")
    said = scrimp("train", "--resume", "moved", "--set", "train.steps=3").output
    assert "resumed from moved" in said or f"resumed from {here / 'moved'}" in said
    assert len(losses(here / "moved")) == 3
    assert not (here / "run").exists()
    assert "done: 4 steps" in scrimp("train", "moved", "--resume", "auto", "--set", "train.steps=4").output


def test_resume_auto_is_spelled_in_two_ways() -> None:
    assert spelled(["c.toml", "--resume", "auto"]) == spelled(["c.toml", "--resume=auto"]) == ["c.toml", "--resume-auto"]
    assert spelled(["--resume", "run", "auto"]) == ["--resume", "run", "auto"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.full)])
def test_a_signal_saves_exits_and_says_how_to_resume(number: signal.Signals, code: int, here: Path) -> None:
    """A real process and a real signal; the resumed run has the losses of one that was not stopped."""
    config = written(here)
    words = ("-m", "scrimp", "train", str(config), "--set", "train.steps=100000", "--set", "schedule.kind=constant")
    with started(*words, cwd=here) as process:
        after_step(here / "run", 3, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    said = re.search(
        rf"stopped by {number.name} after step (\d+); the checkpoint is (\S+); go on with: scrimp train --resume (\S+)", err
    )
    assert said is not None, err
    step = int(said[1])
    assert Path(said[2]).name == f"step-{step:08d}"
    assert "finishing the step, then saving" in err
    steps = ("--set", f"train.steps={step + 3}")
    assert "resumed from" in scrimp("train", "--resume", said[3], *steps).output
    run(config, f"train.steps={step + 3}", "schedule.kind=constant", folder=here / "whole")
    assert figures(here / "run", "step", "loss", "lr") == figures(here / "whole", "step", "loss", "lr")


@pytest.mark.full
def test_top_follows_another_process(here: Path) -> None:
    """It reads only; it loads no torch; it ends with the run."""
    config = written(here)
    code = (
        "import sys, scrimp.cli\nsys.argv = ['scrimp', 'top', 'run', '--seconds', '0.1']\n"
        "try:\n    scrimp.cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
    )
    with started("-m", "scrimp", "train", str(config), "--quiet", "--set", "train.steps=40", cwd=here) as process:
        after_step(here / "run", 0, process)
        with started("-c", code, cwd=here) as top:
            out, err = top.communicate(timeout=60)
            assert top.returncode == 0, err
        assert process.wait(timeout=60) == 0
    lines = out.splitlines()
    assert re.match(
        r"step 40/40 +loss [\d.]+ +validation loss [\d.]+ +[\d,]+ tokens/s +eta 0:00:00 +device peak .* of 64.0 MiB", lines[-2]
    )
    assert lines[-1].startswith("the run ended at ")


def test_top_refuses_what_is_no_run(here: Path) -> None:
    assert "there is no run folder none" in scrimp("top", "none", "--once", code=2).stderr
    assert "is not a run folder" in scrimp("top", str(here), "--once", code=2).stderr
