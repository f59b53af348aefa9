"""Under torchrun: a worker is killed, torchrun starts all of them again, and the run goes on by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scrimp.ext.ranks import pool
from tests.train.runs import TOML, losses, written

ROOT = Path(__file__).parents[2]
JOB = "tests.train.runs:run_on_a_rank"


def lines(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads the workers of torchrun from /proc")
def test_a_killed_worker_is_started_again(tmp_path: Path) -> None:
    """Every loss has the bits of an undisturbed run of two ranks."""
    config = written(tmp_path, TOML.replace("steps = 6", "steps = 60").replace("every = 3", "every = 30"))
    pool(2).run(JOB, str(config), [f"run.folder={tmp_path / 'whole'}"], "new", timeout_seconds=300)
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m",
        "scrimp", "train", str(config), "--quiet",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 120
        while lines(tmp_path / "run") < 8 and agent.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        workers = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(workers[-1]), signal.SIGKILL)
        out = agent.communicate(timeout=150)[0]
    finally:
        agent.kill()
        agent.communicate()
    assert agent.returncode == 0, out
    assert "exitcode: -9" in out
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
