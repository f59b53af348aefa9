"""Tests in processes of their own: what one of them does there is what it is here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = """
import os
from pathlib import Path
import pytest
from tests.support.own_process import in_its_own_process

@pytest.mark.parametrize("what", ["passes", "fails", "skips"])
@in_its_own_process
def test_it(what: str, tmp_path: Path) -> None:
    with open(os.environ["SEEN"], "a") as seen:
        print(what, os.getpid(), os.getppid(), file=seen)
    if what == "skips":
        pytest.skip("not here")
    assert what == "passes", "as it should"
"""


def test_a_test_passes_fails_or_is_skipped_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text(FILE)
    env = {**os.environ, "SEEN": str(tmp_path / "seen"), "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_file.py"]
    done = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=-1, stderr=-1, text=True)
    out, err = done.communicate(timeout=300)
    assert done.returncode == 1, out + err
    assert "2 failed, 1 passed" in out
    assert "as it should" in out
    assert "test_it[skips] in a process of its own ended with 0" in out  # to be skipped there is not to pass
    seen = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert [what for what, *_ in seen] == ["passes", "fails", "skips"]  # each once
    assert len({pid for _, pid, _ in seen}) == 3
    assert {parent for *_, parent in seen} == {str(done.pid)}
