"""The examples: each TOML trains for some steps by the command beside it; scripts of schedulers have the right syntax."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scrimp.report import read_metrics
from scrimp.train import read_config

ROOT = Path(__file__).parents[2]
HERE = ROOT / "examples"
FEW = ("--set", "train.steps=4", "--set", "validation.every=0", "--set", "checkpoint.every=2", "--set", "schedule.warm_up=1")


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A copy, whose scripts find this Python's torchrun and no GPU."""
    shutil.copytree(HERE, tmp_path / "examples")
    return tmp_path / "examples"


def environment(**more: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path, "CUDA_VISIBLE_DEVICES": "", **more}


def ran(*words: str, cwd: Path, **more: str) -> str:
    done = subprocess.run(words, cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def test_one_gpu(examples: Path) -> None:
    said = ran(sys.executable, "-m", "scrimp", "train", "gpt.toml", "--set", "train.steps=6", *FEW[2:], cwd=examples)
    assert "done: 6 steps" in said
    found = losses(examples / "run")
    assert found[-1] < found[0]


@pytest.mark.full
def test_the_script_of_one_gpu(examples: Path) -> None:
    assert re.search(r"step 3/3  loss [\d.]+", ran(sys.executable, "gpt.py", "3", cwd=examples))


def test_one_machine(examples: Path) -> None:
    """Under torchrun, with a plan for its ranks."""
    said = ran("./machine.sh", *FEW, "--set", "cluster.time_limit=2", cwd=examples, RANKS="2")
    assert "done: 4 steps" in said
    assert (examples / "run-machine" / "plan.json").exists()
    assert len(losses(examples / "run-machine")) == 4


@pytest.mark.full
def test_several_machines(examples: Path) -> None:
    """Two agents of torchrun on this machine, each with one rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = environment(RANKS="1", MACHINES="2", HEAD=f"localhost:{port}", JOB="test")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(["./cluster.sh", *FEW], cwd=examples, env=env, **pipes) for _ in range(2)]
    try:
        said = [agent.communicate(timeout=180)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert sum("done: 4 steps" in text for text in said) == 1
    assert len(losses(examples / "run-cluster")) == 4


@pytest.mark.parametrize("path", [*sorted(HERE.glob("*.sh")), *sorted(HERE.glob("*.sbatch"))], ids=lambda path: path.name)
def test_shell_scripts_have_the_right_syntax(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    for name in re.findall(r"[\w/]+\.toml", path.read_text()):
        assert (HERE / Path(name).name).exists()


def test_slurm_directives_come_first() -> None:
    """SLURM reads them up to the first command."""
    lines = (HERE / "slurm.sbatch").read_text().splitlines()
    first = next(k for k, line in enumerate(lines) if line and not line.startswith("#"))
    assert sum(line.startswith("#SBATCH") for line in lines[:first]) == sum("#SBATCH" in line for line in lines) >= 6


def test_the_job_of_kubernetes() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((HERE / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == job["spec"]["elasticPolicy"]["minReplicas"] == job["spec"]["elasticPolicy"]["maxReplicas"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
    mounts = {each["name"] for each in container["volumeMounts"]}
    assert mounts == {each["name"] for each in worker["template"]["spec"]["volumes"]}
    config = next(word for word in container["command"] if word.endswith(".toml"))
    read_config(HERE / Path(config).name, [word for word in container["args"] if "=" in word])


def test_the_text_is_plain_and_small() -> None:
    text = (HERE / "text.txt").read_text(encoding="ascii")
    assert 100_000 < len(text) < 200_000
