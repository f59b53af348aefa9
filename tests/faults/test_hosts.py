"""Two hosts, which are network namespaces here, train as one under torchrun; one that disappears is replaced."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from subprocess import Popen

import pytest

from bench.network import netns
from bench.network.netns import DEVICE, Net
from tests.faults.launch import NEW_STORE, started, torchrun, wait_for_step
from tests.faults.test_restarts import check_same, undisturbed
from tests.faults.training import Run

ROOT = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need root")
PORT = 29400  # of the rendezvous, on the first host; every network has its ports for itself
ENV = {"GLOO_SOCKET_IFNAME": DEVICE, "OMP_NUM_THREADS": "1", **NEW_STORE}
TIMEOUT = 12.0  # of a collective with a host that is gone: no message says that it is


def on_host(net: Net, host: int, run: Run) -> list[str]:
    """One rank on a host, by the command that a user gives there."""
    options = (
        "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "faults",
        "--rdzv-endpoint", f"{net.address(0)}:{PORT}", "--rdzv-conf", f"is_host={int(host == 0)}",
        "--local-addr", net.address(host),
    )  # fmt: skip
    return ["ip", "netns", "exec", net.space(host), *torchrun(run, *options)]


def disappear(net: Net, host: int, agent: Popen[str]) -> None:
    """The cable is cut first, so that no word of its end gets out. Then all of its processes end."""
    netns.output(("ip", "-n", net.hub, "link", "set", f"port{host}", "down"))
    for pid in netns.output(("ip", "netns", "pids", net.space(host))).split():
        os.kill(int(pid), signal.SIGKILL)
    agent.wait(10)


@ROOT
@pytest.mark.full
def test_a_host_that_disappears_is_replaced(tmp_path: Path) -> None:
    """The other host's rank ends by the time-out of its collective. Its agent waits until a third host joins, and both go on from
    the newest checkpoint, to the bits of a run without failures."""
    reason = netns.missing()
    if reason is not None:
        pytest.skip(reason)
    run = Run(folder=str(tmp_path / "run"), steps=60, every=5, least=0.1, timeout=TIMEOUT)
    Path(run.folder).mkdir()
    logs = [tmp_path / f"host-{host}.log" for host in range(3)]
    with netns.network(ranks=3, mbit=1000) as net:
        commands = [on_host(net, host, run) for host in range(3)]
        with started(commands[:2], logs[:2], ENV) as (first, second):
            wait_for_step(run, 12, 120, [first, second])
            disappear(net, 1, second)
            before = run.lines()[-1]["step"]
            with started(commands[2:], logs[2:], ENV) as (third,):
                deadline = time.monotonic() + 240
                codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in (first, third)]
        assert codes == [0, 0], "\n".join(log.read_text()[-2000:] for log in logs)
    assert before < run.steps - 1
    check_same(run, undisturbed(tmp_path / "calm", run))
