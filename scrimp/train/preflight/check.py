"""Compares what a run needs with what the machine has. Pure: it reads nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scrimp.errors import FitError, RunError
from scrimp.ledger import format_nbytes
from scrimp.train.preflight.machine import Machine
from scrimp.train.preflight.needs import Needs

LEAST_TORCH = (2, 11)
SLOW = 100e6  # bytes per second


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`good`: None for a warning. `remedy`: of what is not good."""

    name: str
    text: str
    good: bool | None = True
    remedy: str = ""
    tier: str | None = None


def findings(needs: Needs, machine: Machine, *, saving: bool, launching: bool) -> list[Finding]:
    """`saving`: the run writes checkpoints. `launching`: torchrun is still to start the ranks."""
    return [*_findings(needs, machine, saving=saving, launching=launching)]


def _findings(needs: Needs, machine: Machine, *, saving: bool, launching: bool) -> Iterator[Finding]:
    version = tuple(map(int, re.findall(r"\d+", machine.torch)[:2]))
    least = ".".join(map(str, LEAST_TORCH))
    yield Finding(
        name="torch",
        text=f"{machine.torch}, at least {least}",
        good=version >= LEAST_TORCH,
        remedy=f"pip install 'torch>={least}'",
    )
    yield _room(
        "host memory", needs.host_nbytes, machine.host_nbytes, "host",
        "use a smaller model or more machines, end other processes, set [memory] disk to a folder, or [optimizer] state = 'int8'",
    )  # fmt: skip
    if needs.shm_nbytes and machine.shm_nbytes is not None:
        yield _room(
            "/dev/shm", needs.shm_nbytes, machine.shm_nbytes, "host",
            "start the container with --shm-size=1g or --ipc=host, or in Kubernetes mount an emptyDir of medium Memory there",
        )  # fmt: skip
    shared = needs.tier_nbytes if machine.same_disk else 0
    if saving:
        each = f", {format_nbytes(needs.checkpoint_nbytes)} each" if needs.run_nbytes > needs.checkpoint_nbytes else ""
        yield _room(
            f"disk for checkpoints{each}", needs.run_nbytes + shared, machine.run_nbytes, "disk",
            "free space, give another folder by [run] folder, or keep fewer by [checkpoint] keep",
        )  # fmt: skip
    if machine.tier_nbytes is not None:
        yield _room(
            "disk tier", needs.tier_nbytes, machine.tier_nbytes, "disk", "free space, or give another folder by [memory] disk"
        )
    if machine.tier_rate is not None:
        slow = machine.tier_rate < SLOW
        yield Finding(
            name="disk tier, written", text=f"{machine.tier_rate / 1e6:,.0f} MB/s", good=None if slow else True,
            remedy="steps will wait for this disk: give a folder on a faster one by [memory] disk" if slow else "",
        )  # fmt: skip
    if launching and not machine.port_free:
        yield Finding(
            name="port", text=f"{machine.port} is in use", good=None,
            remedy="start with torchrun --standalone on one machine, or --rdzv-endpoint HOST:PORT with a free port",
        )  # fmt: skip


def _room(name: str, needed: int, free: int, tier: str, remedy: str) -> Finding:
    return Finding(
        name=name, text=f"needs {format_nbytes(needed)} or more, {format_nbytes(free)} free", good=needed <= free, remedy=remedy,
        tier=tier,
    )  # fmt: skip


def refuse(found: Sequence[Finding]) -> None:
    """Raises for everything that is not good."""
    bad = [each for each in found if each.good is False]
    if not bad:
        return
    words = "; ".join(f"{each.name} {each.text}: {each.remedy}" for each in bad)
    if bad[0].tier is not None:
        raise FitError(f"before the run: {words}", tier=bad[0].tier)
    raise RunError(f"before the run: {words}")


def line(each: Finding) -> str:
    mark = {True: "ok", None: "warning", False: "no"}[each.good]
    return f"{each.name}: {each.text} [{mark}]" + (f"; {each.remedy}" if each.good is not True and each.remedy else "")
