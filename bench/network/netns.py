"""A slow network on one machine: a namespace for each rank, joined by a bridge, every cable limited by `tc tbf`.

The bridge has a namespace of its own, so nothing of the machine's own network is touched, and all of it is gone once the
namespaces are. It needs root, `ip` and `tc`; `missing()` says what is not there.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

PREFIX = "scrimp"
DEVICE = "eth0"  # what a rank's interface is called inside its namespace
BURST = 256 << 10  # bytes: with less, tbf does not come to a Gbit/s; with more, more goes out unlimited after a pause
QUEUE = "100ms"  # the longest that a packet may wait for its turn; what would wait longer is dropped, and sent again
FOLDER = Path("/run/netns")

Command = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Net:
    """`mbit`: what each rank can send and receive, in Mbit/s. `run`: names its namespaces; see `new_run`."""

    ranks: int
    mbit: int
    run: str

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 250:
            raise ValueError(f"ranks={self.ranks} is not possible: 1 to 250, for the addresses of one network")
        if self.mbit < 1:
            raise ValueError(f"mbit={self.mbit} is not possible: at least 1")
        if len(self.run.split("-")) != 3:
            raise ValueError(f"run={self.run!r} does not name a process: see new_run()")

    @property
    def hub(self) -> str:
        return f"{PREFIX}-{self.run}-hub"

    def space(self, rank: int) -> str:
        return f"{PREFIX}-{self.run}-rank{rank}"

    def spaces(self) -> list[str]:
        return [self.hub, *map(self.space, range(self.ranks))]

    def address(self, rank: int) -> str:
        return f"10.77.0.{rank + 1}"


@dataclass(frozen=True)
class Bytes:
    """What went through a rank's cable, as the rank's end and the bridge's end counted it; `drops`: packets, at both."""

    sent: int
    received: int
    sent_at_hub: int
    received_at_hub: int
    drops: int

    def since(self, before: Bytes) -> Bytes:
        return Bytes(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))


def new_run(pid: int | None = None) -> str:
    """Process, when it was started, and something random: so that another can tell whether it is still there."""
    pid = os.getpid() if pid is None else pid
    return f"{pid}-{_started(pid)}-{secrets.token_hex(3)}"


def making(net: Net) -> list[Command]:
    """All commands that make the network, in order."""
    commands: list[Command] = [("ip", "netns", "add", name) for name in net.spaces()]
    commands += [("ip", "-n", net.hub, "link", "add", "bridge", "type", "bridge")]
    commands += [("ip", "-n", net.hub, "link", "set", "bridge", "up")]
    limit = ("root", "tbf", "rate", f"{net.mbit}mbit", "burst", str(BURST), "latency", QUEUE)
    for rank in range(net.ranks):
        here, port = net.space(rank), f"port{rank}"
        commands += [
            ("ip", "-n", net.hub, "link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", here),
            ("ip", "-n", net.hub, "link", "set", port, "master", "bridge", "up"),
            ("ip", "-n", here, "address", "add", f"{net.address(rank)}/24", "dev", DEVICE),
            ("ip", "-n", here, "link", "set", "lo", "up"),
            ("ip", "-n", here, "link", "set", DEVICE, "up"),
            ("tc", "-n", here, "qdisc", "add", "dev", DEVICE, *limit),
            ("tc", "-n", net.hub, "qdisc", "add", "dev", port, *limit),
        ]
    return commands


def undoing(spaces: Iterable[str]) -> list[Command]:
    """Cables and bridge go with their namespaces."""
    return [("ip", "netns", "delete", name) for name in spaces]


def leftovers(there: Iterable[str], lives: Callable[[int, str], bool]) -> list[str]:
    """Those namespaces that belong to runs whose process is gone. `lives(pid, started)`: whether that one is still there."""
    found = []
    for name in there:
        parts = name.split("-")
        if len(parts) == 5 and parts[0] == PREFIX and parts[1].isdigit() and not lives(int(parts[1]), parts[2]):
            found.append(name)
    return found


def missing() -> str | None:
    """Why there can be no such network here, found out by making a small one; None where there can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (of the package iproute2)"
    try:
        with network(ranks=1, mbit=100):
            return None
    except OSError as error:
        return str(error)


@contextmanager
def network(*, ranks: int, mbit: int) -> Iterator[Net]:
    """Gone at the end, whatever happened inside, SIGTERM among it; what dead runs left is removed first."""
    net = Net(ranks=ranks, mbit=mbit, run=new_run())
    with _ended_by(signal.SIGTERM, signal.SIGHUP):
        remove(leftovers(_spaces(), _lives))
        try:
            for command in making(net):
                output(command)
            yield net
        finally:
            remove(net.spaces())


def remove(spaces: Iterable[str]) -> None:
    """Those that are there, with every process still inside. Goes on after a failure, and tells of it at the end."""
    wrong = []
    with _handled(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for command in undoing([name for name in spaces if (FOLDER / name).exists()]):
            try:
                for pid in output(("ip", "netns", "pids", command[-1])).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                output(command)
            except OSError as error:
                wrong.append(str(error))
    if wrong:
        raise OSError("\n".join(wrong))


def counters(net: Net) -> list[Bytes]:
    """Of each rank, since the network was made."""
    at_hub = _links(net.hub)
    drops_at_hub = _drops(net.hub)
    found = []
    for rank in range(net.ranks):
        mine, port = _links(net.space(rank))[DEVICE], at_hub[f"port{rank}"]
        drops = _drops(net.space(rank))[DEVICE] + drops_at_hub[f"port{rank}"]
        found.append(Bytes(mine["tx"], mine["rx"], port["rx"], port["tx"], drops))  # its sent is what the hub received
    return found


def output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _links(space: str) -> dict[str, dict[str, int]]:
    found = json.loads(output(("ip", "-n", space, "-json", "-statistics", "link", "show")))
    return {link["ifname"]: {way: link["stats64"][way]["bytes"] for way in ("rx", "tx")} for link in found}


def _drops(space: str) -> dict[str, int]:
    found = json.loads(output(("tc", "-n", space, "-json", "-statistics", "qdisc", "show")))
    return {queue["dev"]: queue["drops"] for queue in found if queue["kind"] == "tbf"}


def _spaces() -> list[str]:
    return sorted(path.name for path in FOLDER.iterdir()) if FOLDER.exists() else []


def _started(pid: int) -> str:
    """In ticks since the machine's start; with it a number that was given again is not taken for the same process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _lives(pid: int, started: str) -> bool:
    try:
        return _started(pid) == started
    except OSError:
        return False


@contextmanager
def _ended_by(*signals: signal.Signals) -> Iterator[None]:
    """These signals end the program as an exception does, so that everything is cleaned up on the way."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled(end, *signals):
        yield


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None] | signal.Handlers, *signals: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
