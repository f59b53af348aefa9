"""`scrimp plan`: what it prints and writes, and what it says where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scrimp import Plan
from tests.cli.test_cli import _plain_wide_output, scrimp

__all__ = ["_plain_wide_output"]  # a fixture, for every test here


def test_a_plan_is_printed_and_written(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    text = scrimp("plan", "gpt-tiny", "--cluster", "4xA100-80", "--mesh", "x=4", "--batch", "8", "--out", str(out)).output
    assert "if every byte were there once" in text
    assert "\nblocks.0" in text
    assert "\n  attention.qkv.weight " in text
    assert json.loads(out.read_text())["format"] == "scrimp.plan"


def test_what_is_reserved_is_printed_and_written(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    where = ["--cluster", "2xA100-80", "--mesh", "x=2", "--batch", "8", "--keep", "--time-limit", "2"]
    text = scrimp("plan", "gpt-tiny", *where, "--memory", "3GiB", "--reserve", "auto", "--out", str(out), "--baselines").output
    assert "beside    the plan, which may use" in text
    written = Plan.load(out)
    assert written.reserve is not None
    assert str(written.reserve.parts[-1]).startswith("NCCL ")
    assert all(str(part) in text for part in written.reserve.parts)
    text = scrimp("plan", "gpt-tiny", *where, "--memory", "3GiB", "--reserve", "1GiB").output
    assert "of the budget of 3.0 GiB: reserve 1.0 GiB (given)" in text
    told = scrimp("plan", "gpt-tiny", *where, "--memory", "1GiB", "--reserve", "2GiB", code=1).stderr
    assert "a budget of 1.0 GiB, and beside the plan it needs 2.0 GiB: reserve 2.0 GiB (given)" in told
    assert "reserve='much'" in scrimp("plan", "gpt-tiny", *where, "--reserve", "much", code=2).stderr


def test_known_parallelisms_stand_beside_it() -> None:
    words = ["gpt-tiny", "--set", "seq=16", "--set", "dropout=0.1", "--set", "attention=eager", "--set", "layers=3"]
    text = scrimp("plan", *words, "--cluster", "2xA100-80", "--mesh", "x=2", "--batch", "4", "--keep", "--baselines").output
    rows = {line.split()[0]: line for line in text.splitlines() if line.rstrip().endswith("yes")}
    assert {"this", "ddp", "zero-3-full", "tp", "tp-sp-selective", "tp-sp-full"} <= rows.keys()
    assert "tp=2" in rows["tp-sp"]
    assert "no data-parallel axis" in text  # why there is no distributed optimizer
    assert "tp-sp-dist-opt" not in rows


def test_stages_are_printed() -> None:
    where = ["--cluster", "4xA100-80", "--batch", "8", "--keep", "--mesh", "x=2"]
    text = scrimp("plan", "gpt-tiny", *where, "--stages", "2", "--micro-batches", "2").output
    assert "2 stages, 2 micro-batches, 1F1B; devices wait" in text
    assert "stage 1" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt-huge", "--cluster", "8xH100"], "the zoo has no model 'gpt-huge'"),
        (["gpt-tiny", "--cluster", "8xH1000"], "H100"),
        (["gpt-tiny", "--cluster", "8xH100", "--set", "layers"], "name=value"),
        (["gpt-tiny", "--cluster", "8xH100", "--mesh", "x=16"], "16 devices"),
        (["nothing:here", "--cluster", "8xH100"], "nothing:here"),
        (["gpt-tiny", "--cluster", "8xH100", "--stages", "3"], "do not divide equally"),
        (["gpt-tiny", "--cluster", "8xH100", "--stages", "few"], "stages='few'"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: list[str], words: str) -> None:
    assert words in scrimp("plan", *arguments, code=2).stderr


def test_what_does_not_fit_is_no_error_of_usage() -> None:
    told = scrimp("plan", "gpt-tiny", "--cluster", "8xH100", "--mesh", "x=8", "--memory", "10KiB", code=1)
    assert "KiB" in told.stderr


SMALL = ("plan", "gpt-tiny", "--set", "layers=2", "--cluster", "4xCPU", "--mesh", "x=4", "--batch", "16", "--keep")


def test_a_plan_is_explained_and_changed() -> None:
    text = scrimp(*SMALL, "--explain", "blocks.0.mlp.up.weight", "--what-if", "+10KiB", "--what-if", "-100KiB").output
    assert "blocks.0.mlp.up.weight, on the mesh x=4" in text
    assert "or else  addmm" in text
    assert "what if +10KiB\nobjective " in text
    assert "step " in text.partition("what if +10KiB")[2]
    assert "what if -100KiB\nit does not fit: on the mesh x=4" in text
    assert "so far" not in text  # the line that lives while it searches is for terminals


def test_plans_in_files_are_compared(tmp_path: Path) -> None:
    one, other = str(tmp_path / "one.json"), str(tmp_path / "other.json")
    scrimp(*SMALL, "--out", one)
    scrimp(*SMALL, "--objective", "time", "--out", other)
    assert scrimp("diff", one, one).output == "no difference\n"
    text = scrimp("diff", one, other).output
    assert "memory -> time" in text
    assert "blocks.0" in text
    assert "cannot be read" in scrimp("diff", one, str(tmp_path / "none.json"), code=2).stderr
    (tmp_path / "none.json").write_text("{}")
    assert "none.json: this is None" in scrimp("diff", one, str(tmp_path / "none.json"), code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--what-if", "more"], "'+2GiB'"), (["--explain", "blocks.7"], "blocks.0"), (["--what-if", "-1 node"], "1 of 4 devices")],
)
def test_what_cannot_be_answered_is_said(arguments: list[str], words: str) -> None:
    assert words in scrimp(*SMALL, *arguments, code=2).stderr
