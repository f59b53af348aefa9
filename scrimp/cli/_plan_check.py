"""Checks the arguments of `scrimp plan` before torch is loaded: files, names, numbers, the cluster, the model and its
settings."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from scrimp.cli._files import check_writable
from scrimp.cluster import Cluster
from scrimp.errors import PlanError
from scrimp.ledger import parse_nbytes
from scrimp.planner import change_of, check_names, check_reserve, schedules, stage_cluster, whole_mesh
from scrimp.train import FUNCTION, check_model, cluster_of, kind_of

BATCH, SEQ = 32, 2048  # unless given
DIGITS = 9


def refuse_old(**options: tuple[object, str]) -> None:
    """Rejects options by their old names: the error names the new one."""
    for name, (given, new) in options.items():
        if given is not None:
            raise PlanError(f"--{name} is now {new}")


def check(
    *, model: str, cluster: str, mesh: str | None, memory: str | None, batch: int | None, seq: int | None, objective: str,
    optimizer: str, precision: str, stages: str, micro_batches: str, interleave: int, settings: Sequence[str], time_limit: float,
    gap: float, out: Path | None, explain: Sequence[str], what_if: Sequence[str], report: Path | None = None,
    reserve: str | None = None,
) -> None:  # fmt: skip
    """Raises `ScrimpError` for the first wrong argument."""
    check_writable("--out", out)
    check_writable("--report", report)
    check_names(precision=precision, optimizer=optimizer, objective=objective, time_limit=time_limit, gap=gap)
    if not isfinite(time_limit):
        raise PlanError(f"--time-limit {time_limit}: give a finite number")
    if mesh is not None and not mesh.strip():
        raise PlanError("--mesh '': write axes and their sizes, such as x=2,y=4; leave out --mesh to have it searched")
    known = cluster_of(cluster)
    _check_schedule(known, mesh, None if kind_of(model) == FUNCTION else batch or BATCH, stages, micro_batches, interleave)
    if memory is not None and parse_nbytes(memory) <= 0:
        raise PlanError(f"--memory {memory}: give a size, such as 24GiB")
    check_reserve(reserve)
    _check_names(known, stages, micro_batches, interleave, explain, what_if)
    check_model(model, batch, seq, settings)


def _check_schedule(
    cluster: Cluster, mesh: str | None, rows: int | None, stages: str, micro_batches: str, interleave: int
) -> None:
    devices = 1 if cluster.hardware is None else cluster.hardware.devices
    counts = [number_of(stages)] if rows is None else []
    if rows is not None:
        tries = schedules(number_of(stages), number_of(micro_batches), interleave, devices, rows)
        counts = [*dict.fromkeys(count for count, _ in tries)]
    for count in counts:
        part = stage_cluster(cluster, count)[0] if isinstance(count, int) and count > 1 else cluster
        if mesh is not None and isinstance(count, int):
            whole_mesh(part, mesh, "the cluster" if part is cluster else "a stage")


def _check_names(
    cluster: Cluster, stages: str, micro_batches: str, interleave: int, explain: Sequence[str], what_if: Sequence[str]
) -> None:
    changes = [change_of(text) for text in what_if]
    if what_if and (stages, micro_batches) != ("1", "1"):
        raise PlanError(
            "--what-if does not support stages and micro-batches: plan again with another --memory or --cluster, "
            "and compare the files with scrimp diff"
        )
    for text, change in zip(what_if, changes, strict=True):
        nodes = cluster.hardware.nodes if cluster.hardware else 1
        if nodes + change.nodes < 1:
            each = cluster.hardware.devices_per_node if cluster.hardware else 1
            raise PlanError(f"--what-if '{text}': the plan is for {nodes} of {each} devices, and at least one node must remain")
    if explain and interleave > 1:
        raise PlanError("--explain does not support --interleave: each device has several model chunks")


def number_of(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= DIGITS else text
