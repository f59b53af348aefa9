"""Starts training runs, and restarts them: by torchrun's agent in a process of its own, by `torchrun`, or rank by rank.

Processes are ended by their process ids, whatever happens. Ranks of the agent are forked from it, so that an attempt starts in
a fraction of a second; `torchrun` starts Python anew, as users have it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from scrimp.ext._rank_start import rank_context
from tests.faults.training import Run, alone

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# Without it the agent keeps the store by which ranks find each other, and a restarted rank may read where a dead one listened.
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **NEW_STORE}


def _local() -> None:
    os.environ.update(LOCAL)


def _agent(text: str, world: int, restarts: int, logs: str) -> None:
    """What torchrun does: the same agent, with a function in place of a script."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _local()
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=world, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="faults",
        local_addr="localhost", max_restarts=restarts, monitor_interval=0.05, start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL),
    )  # fmt: skip
    elastic_launch(config, alone)(text)


def _rank(text: str, rank: int, world: int, port: int) -> None:
    _local()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    alone(text)


@contextmanager
def agent(run: Run, world: int, restarts: int) -> Iterator[BaseProcess]:
    logs = Path(run.folder) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with _ended([rank_context().Process(target=_agent, args=(run.to_json(), world, restarts, str(logs)))]) as (process,):
        yield process


@contextmanager
def ranks(run: Run, world: int) -> Iterator[list[BaseProcess]]:
    port, context = free_port(), rank_context()
    with _ended([context.Process(target=_rank, args=(run.to_json(), rank, world, port)) for rank in range(world)]) as processes:
        yield processes


@contextmanager
def _ended(processes: list[BaseProcess]) -> Iterator[list[BaseProcess]]:
    """Starts them; at the end those that still run are killed, with their children."""
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            _kill(process.pid or 0)
        for process in processes:
            process.join()


def _kill(pid: int) -> None:
    """A process and what it started, if it is still there."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        _kill(int(child))
    if state != "Z":
        os.kill(pid, signal.SIGKILL)


def torchrun(run: Run, *options: str) -> list[str]:
    """The command of a user."""
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.faults.training", run.to_json()]


@contextmanager
def started(
    commands: Sequence[Sequence[str]], logs: Sequence[Path], env: dict[str, str]
) -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("a") as file:
                processes.append(
                    subprocess.Popen(command, stdout=file, stderr=file, text=True, cwd=ROOT, env={**os.environ, **env})
                )
        yield processes
    finally:
        for process in processes:
            _kill(process.pid)
            process.wait()


def wait_for_step(run: Run, step: int, seconds: float, alive: Sequence[BaseProcess | subprocess.Popen[str]] = ()) -> None:
    """Until rank 0 has made so many steps; no process of `alive` may end before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if run.log.exists() and any(line["step"] >= step for line in run.lines()):
            return
        codes = [process.poll() if isinstance(process, subprocess.Popen) else process.exitcode for process in alive]
        if any(code is not None for code in codes):
            raise AssertionError(f"processes ended with {codes}: {said(run)}")
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within {seconds:g} s: {said(run)}")


def said(run: Run) -> str:
    """The ends of what ranks wrote to stderr, and when steps were made."""
    texts = [f"{path}:\n{path.read_text()[-1500:]}" for path in sorted(Path(run.folder).rglob("stderr.log"))[-3:]]
    return "\n".join([json.dumps(run.lines()[-3:]) if run.log.exists() else "no step", *texts])
