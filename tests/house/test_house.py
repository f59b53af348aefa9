"""The house rules that no linter knows: what the root offers, what loads what, where torch.distributed may be used."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import scrimp

PACKAGE = Path(scrimp.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Effects sit at the edge: these few modules talk to other processes, no one else does.
DISTRIBUTED = {
    "engine/lowered/dtensors.py", "engine/setup/process_groups.py", "move/run/agree.py", "move/run/channels.py",
    "move/run/comm.py", "move/run/peers.py", "move/run/torch_private.py", "ext/_dtensor_private.py", "ext/dtensor.py",
    "ext/ddp.py", "ext/dtensor_plans.py", "ext/lightning/_ranks.py", "ext/ranks.py", "cli/demo/moves.py", "cli/demo/train.py",
    "cli/_doctor.py", "train/ranks.py",
}  # fmt: skip


def test_the_root_offers_its_names_and_no_package_has_one_of_them() -> None:
    for name in scrimp.__all__:
        assert getattr(scrimp, name) is not None
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not packages & {*scrimp.__all__}
    with pytest.raises(AttributeError, match="teleport"):
        scrimp.teleport  # noqa: B018


@pytest.mark.parametrize(
    "code", ["import scrimp; scrimp.report.write", "from scrimp import Mesh, Layout, Cluster", "import scrimp.cli"]
)
def test_importing_loads_no_torch(code: str) -> None:
    check = f"{code}; import sys; assert not {{'torch', 'jax'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_planning_loads_no_torch() -> None:
    code = "import scrimp; scrimp.synthesize((8, 8), scrimp.Mesh({'x': 2}), '[x,-]', '[-,x]')"
    subprocess.run([sys.executable, "-c", f"{code}; import sys; assert 'torch' not in sys.modules"], check=True)


def test_torch_distributed_is_used_only_at_the_edge() -> None:
    for path in FILES:
        names = [
            name
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        ]
        uses = any(name.startswith("torch.distributed") for name in names)
        if uses:
            assert str(path.relative_to(PACKAGE)) in DISTRIBUTED, path


def test_files_hold_one_idea() -> None:
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 400, path
        assert "util" not in path.name


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize(("env", "words", "threads"), [(None, [], "1"), ("2", [], "2"), (None, ["OMP_NUM_THREADS=3"], "3")])
def test_make_gives_tests_the_threads_that_are_asked_for(env: str | None, words: list[str], threads: str) -> None:
    """By an environment variable or by an argument; one, if nobody asks. The make that runs this test must not be seen."""
    given = {key: value for key, value in os.environ.items() if key not in {"OMP_NUM_THREADS", "MAKEFLAGS", "MAKEOVERRIDES"}}
    command = ["make", "--silent", "--eval=threads:;@echo $$OMP_NUM_THREADS", "threads", *words]
    asked = given | ({"OMP_NUM_THREADS": env} if env else {})
    assert subprocess.run(command, cwd=PACKAGE.parent, env=asked, capture_output=True, text=True, check=True).stdout.split() == [
        threads
    ]


def test_the_threads_that_are_asked_for_are_torchs() -> None:
    code = "import tests.conftest, torch; print(torch.get_num_threads())"
    asked = {**os.environ, "OMP_NUM_THREADS": "2"}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, env=asked, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["2"]
