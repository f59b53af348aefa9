"""The example: it trains within its budget, with the losses of transformers' own trainer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")

EXAMPLE = Path(__file__).parents[3] / "examples" / "hf_trainer.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("hf_trainer_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("steps", [20, pytest.param(80, marks=pytest.mark.full)])
def test_it_trains(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    module = load()
    losses = [log["loss"] for log in module.main(["--steps", str(steps)]) if "loss" in log]
    roomy = [log["loss"] for log in module.main(["--steps", str(steps), "--memory", "64MiB"]) if "loss" in log]
    assert losses == roomy
    assert len(losses) == steps // 10
    assert losses[-1] < losses[0]
    out = capsys.readouterr().out
    assert "model data of plain PyTorch: 12.8 MiB" in out
    assert steps < 80 or "after 10, 12, 14, 16: [18, 20, 22, 24, 26, 28]" in out
