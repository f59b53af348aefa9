"""Ranks that are killed while they train: the run goes on from its newest checkpoint, and ends with the bits of a run without
failures."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scrimp import checkpoint
from scrimp.ext.ranks import pool
from tests.faults.launch import LOCAL, agent, ranks, said, started, torchrun, wait_for_step
from tests.faults.training import TERMINATED, Faults, Run

WORLD = 2
ENDLESS = 10**6  # steps; such a run ends `tail` steps after its last failure
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc, and ranks forked from an agent")
pytestmark = LINUX


def undisturbed(folder: Path, run: Run) -> Run:
    """As many steps without a failure, in ranks that are there already."""
    folder.mkdir()
    steps = 1 + max(line["step"] for line in run.lines())
    calm = replace(run, folder=str(folder), steps=steps, tail=None, least=0.0, faults=None)
    pool(WORLD).run("tests.faults.training:train", calm.to_json(), timeout_seconds=500)
    return calm


def check_same(run: Run, calm: Run) -> None:
    """Every byte of the last checkpoint: weights, states, counters, random state. And every loss."""
    files = {path.name: path.read_bytes() for path in run.final.iterdir()}
    assert files == {path.name: path.read_bytes() for path in calm.final.iterdir()}
    losses = {line["step"]: line["loss"] for line in calm.lines()}
    assert sorted(losses) == [*range(calm.steps)]
    for line in run.lines():
        assert line["loss"] == losses[line["step"]]


def attempts(run: Run) -> set[int]:
    return {line["attempt"] for line in run.lines()}


def test_kills_at_any_instant_leave_no_trace(tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path / "run"), steps=ENDLESS, every=2, tail=6, faults=Faults(count=3, steps=4))
    with agent(run, WORLD, restarts=3) as process:
        process.join(120)
        assert process.exitcode == 0, said(run)
    assert max(attempts(run)) == 3
    check_same(run, undisturbed(tmp_path / "calm", run))


@pytest.mark.full
def test_twenty_kills_under_torchrun_leave_no_trace(tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path / "run"), steps=ENDLESS, every=4, tail=8, faults=Faults(count=20, steps=8, seed=1))
    Path(run.folder).mkdir()
    options = ("--standalone", "--nproc-per-node", str(WORLD), "--max-restarts", "20")
    with started([torchrun(run, *options)], [tmp_path / "stderr.log"], LOCAL) as (process,):
        assert process.wait(590) == 0, said(run)
    assert max(attempts(run)) == 20
    check_same(run, undisturbed(tmp_path / "calm", run))


def test_after_sigterm_a_run_saves_and_ends_with_143_and_goes_on(tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path / "run"), steps=40, every=1000, least=0.02)
    Path(run.folder).mkdir()
    with ranks(run, WORLD) as processes:
        wait_for_step(run, 3, 60, processes)
        os.kill(processes[1].pid or 0, signal.SIGTERM)  # one is enough: all ranks end after the same step
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [TERMINATED] * WORLD
    last = run.lines()[-1]["step"] + 1
    assert last < run.steps
    assert checkpoint.latest(run.checkpoints) == checkpoint.step_folder(run.checkpoints, last)
    with ranks(run, WORLD) as processes:
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * WORLD
    assert len(run.lines()) == run.steps
    check_same(run, undisturbed(tmp_path / "calm", run))


def test_restarts_that_would_meet_old_addresses_are_warned_of() -> None:
    (words,), (nothing) = pool(WORLD).run("tests.rank_jobs.elastic.faults:warned_under_torchrun", "3", "True")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in words
    assert not nothing  # rank 0 speaks for all
    for given in (("0", "True"), ("3", "False")):
        assert pool(WORLD).run("tests.rank_jobs.elastic.faults:warned_under_torchrun", *given) == [[], []]


@pytest.mark.full
def test_sigterm_of_torchruns_agent_reaches_the_ranks(tmp_path: Path) -> None:
    run = Run(folder=str(tmp_path / "run"), steps=4000, every=1000, least=0.02)
    with agent(run, WORLD, restarts=0) as process:
        wait_for_step(run, 3, 60, [process])
        os.kill(process.pid or 0, signal.SIGTERM)
        process.join(60)
        assert process.exitcode not in (0, None)
    last = run.lines()[-1]["step"] + 1
    assert checkpoint.latest(run.checkpoints) == checkpoint.step_folder(run.checkpoints, last)
