"""`scrimp plan`: what it prints and writes, and what it says where it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_cli import _plain_wide_output, scrimp

__all__ = ["_plain_wide_output"]  # a fixture, for every test here


def test_a_plan_is_printed_and_written(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    text = scrimp("plan", "gpt-tiny", "--cluster", "4xA100-80", "--mesh", "x=4", "--batch", "8", "--out", str(out)).output
    assert "if every byte were there once" in text
    assert "blocks.0.attention.qkv.weight" in text
    assert json.loads(out.read_text())["format"] == "scrimp.plan"


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
        (["gpt-tiny", "--cluster", "8xH100", "--mesh", "x=8", "--budget", "10KiB"], "KiB"),
        (["nothing:here", "--cluster", "8xH100"], "nothing:here"),
        (["gpt-tiny", "--cluster", "8xH100", "--stages", "3"], "stages are equal parts"),
        (["gpt-tiny", "--cluster", "8xH100", "--stages", "few"], "stages='few'"),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: list[str], words: str) -> None:
    assert words in scrimp("plan", *arguments, code=2).stderr
