"""A Python module on every rank of a network, each inside its namespace; ended by process id when they take too long.

A rank finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment, and prints a line of JSON as its last word.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.network.netns import DEVICE, Net

PORT = 29500  # the same always: every network has its ports for itself
POLL_S = 0.1
GRACE_S = 5.0  # between the signal that makes a rank say where it stands and the one that it cannot refuse
LINES = 30  # of what a rank said on stderr


class RanksError(RuntimeError):
    """Says of every rank how it ended, what it had printed last, and where it stood."""


def environment(net: Net, rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(net.ranks),
        "MASTER_ADDR": net.address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
    }


def command(net: Net, rank: int, module: str, arguments: Sequence[str]) -> list[str]:
    """With faulthandler, so that SIGABRT makes it print the stacks of all its threads, wherever it is."""
    python = [sys.executable, "-X", "faulthandler", "-m", module, *arguments]
    return ["ip", "netns", "exec", net.space(rank), *python]


def run_ranks(net: Net, module: str, arguments: Sequence[str], *, seconds: float) -> list[Any]:
    """What each rank printed last, read as JSON. When one fails, or `seconds` are over, all are ended."""
    home = Path(__file__).resolve().parents[2]
    with ExitStack() as stack:
        files = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in range(net.ranks)]
        processes: list[subprocess.Popen[bytes]] = []
        _no_core_files()
        try:
            for rank, (out, err) in enumerate(files):
                env = {**os.environ, **environment(net, rank)}
                processes.append(
                    subprocess.Popen(command(net, rank, module, arguments), stdout=out, stderr=err, env=env, cwd=home)
                )
            late = _wait(processes, time.monotonic() + seconds)
        finally:
            ended = _end(processes)
        said = [[_text(file) for file in pair] for pair in files]
    if late or any(process.returncode for process in processes):
        why = f"not done in {seconds:.0f} s" if late else _first_failure(processes, said, ended)
        raise RanksError(f"{module}: {why}\n" + "\n".join(_where(processes, said, ended)))
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in said]


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Until all have ended, or one has failed, or it is too late (True): whoever waits for a dead rank waits for long."""
    while None in (codes := [process.poll() for process in processes]):
        if any(codes):
            return False
        if time.monotonic() > deadline:
            return True
        time.sleep(POLL_S)
    return False


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> Mapping[int, bool]:
    """Those that still run, by process id. For each process whether it had to be ended."""
    running = {process.pid: process.poll() is None for process in processes}
    for process in processes:
        process.send_signal(signal.SIGABRT)  # nothing happens to one that has ended
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return running


def _first_failure(processes: Sequence[subprocess.Popen[bytes]], said: Sequence[Sequence[str]], ended: Mapping[int, bool]) -> str:
    """Of those that failed by themselves."""
    rank = next(rank for rank, process in enumerate(processes) if process.returncode and not ended[process.pid])
    return f"rank {rank} failed: {(said[rank][1].strip().splitlines() or ['without a word'])[-1]}"


def _where(processes: Sequence[subprocess.Popen[bytes]], said: Sequence[Sequence[str]], ended: Mapping[int, bool]) -> list[str]:
    lines = []
    for rank, (process, (out, err)) in enumerate(zip(processes, said, strict=True)):
        how = "was ended" if ended[process.pid] else f"ended with {process.returncode}"
        last = (out.strip().splitlines() or ["nothing"])[-1]
        lines += [f"rank {rank} (process {process.pid}) {how}; it printed last: {last[:200]}"]
        lines += [f"  {line}" for line in err.strip().splitlines()[-LINES:]]
    return lines


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def _no_core_files() -> None:
    """A rank that is asked where it stands must not leave its memory on the disk."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
