"""A plan does not depend on the process that makes it: two of them, with other hashes and nothing cached, write one file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
import torch, scrimp
from scrimp import zoo
with torch.device("meta"):
    model = zoo.build("gpt-tiny")
plan = scrimp.plan(model, zoo.example_on_meta("gpt-tiny", batch=8), "4xA100-80", mesh="x=2,y=2", time_limit=200)
plan.save(sys.argv[1])
"""


@pytest.mark.full
def test_two_processes_make_one_plan(tmp_path: Path) -> None:
    """The file but for the seconds that the planner took. Proven, so that no time limit decides."""
    found = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "XDG_CACHE_HOME": str(tmp_path / seed)}
        path = tmp_path / f"{seed}.json"
        subprocess.run([sys.executable, "-c", CODE, str(path)], check=True, timeout=300, env=env)
        found.append(json.loads(path.read_text()))
        assert found[-1].pop("spent_seconds") > 0
    assert found[0]["gap"] == 0
    assert found[0] == found[1]
