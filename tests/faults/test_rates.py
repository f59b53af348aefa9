"""Failures at a rate: how many end no run, and how much of the time is useful."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.faults.launch import agent, said
from tests.faults.test_restarts import ENDLESS, LINUX, WORLD, attempts, check_same, undisturbed
from tests.faults.training import Faults, Run

pytestmark = LINUX


def useful_share(run: Run, began: float) -> float:
    """Seconds in steps that were made for good, of all seconds from the start to the last step. Steps that were lost, restarts,
    loading and saving are no use."""
    last = {line["step"]: line for line in run.lines()}
    return sum(line["ended"] - line["began"] for line in last.values()) / (max(line["ended"] for line in last.values()) - began)


def endured(run: Run, tmp_path: Path, seconds: float) -> float:
    """Runs it with its failures, and once more without any: the useful share of the time."""
    assert run.faults is not None
    began = time.time()
    with agent(run, WORLD, restarts=run.faults.count) as process:
        process.join(seconds)
        assert process.exitcode == 0, said(run)
    assert max(attempts(run)) == run.faults.count
    share, steps = useful_share(run, began), 1 + max(line["step"] for line in run.lines())
    found = {"failures": run.faults.count, "steps": steps, "seconds": round(time.time() - began), "useful": round(share, 3)}
    print(json.dumps(found), file=sys.__stdout__, flush=True)
    check_same(run, undisturbed(tmp_path / "calm", run))
    return share


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_a_hundred_failures(seed: int, tmp_path: Path) -> None:
    """In two runs. One failure every 2.5 s on average, six times as often as one in 15 s, with steps and checkpoints to scale."""
    faults = Faults(count=50, seconds=2.5, seed=seed)
    endured(Run(folder=str(tmp_path / "run"), steps=ENDLESS, every=2, least=0.2, tail=8, faults=faults), tmp_path, 590)


@pytest.mark.full
def test_nine_tenths_of_the_time_are_useful(tmp_path: Path) -> None:
    """Ten failures, 45 s apart on average: four times as often as one in 200 s. A restart takes as long as ever."""
    faults = Faults(count=10, seconds=45.0, seed=6)
    run = Run(folder=str(tmp_path / "run"), steps=ENDLESS, every=4, least=0.5, tail=20, faults=faults)
    assert endured(run, tmp_path, 590) >= 0.9
