"""The bytes of a device that a plan may use: the budget, without what the device needs beside the plan.

`reserve` of `scrimp.plan` is None (nothing: the budget is for live storages), "auto" (what the cluster's devices need, part by
part), or a size.
"""

from __future__ import annotations

from typing import Any, Protocol

from scrimp.cluster import GIVEN, Cluster, ReservePart, groups_of
from scrimp.errors import FitError, PlanError, ScrimpError
from scrimp.layout import Mesh
from scrimp.ledger import format_least, format_nbytes, parse_nbytes
from scrimp.planner.answers.plan import PlannedReserve

AUTO = "auto"


class Memory(Protocol):
    """The attribute of the engine's `Memory` that the planner reads."""

    @property
    def device(self) -> int | str: ...


def budget_of(cluster: Cluster, memory: int | str | Memory | None) -> int:
    """Bytes of a device. `memory`: a size, or the `Memory` of an engine, of which the device's part counts."""
    size: Any = memory if memory is None or isinstance(memory, (int, str)) else getattr(memory, "device", memory)
    if size not in (None, "auto"):
        budget = parse_nbytes(size)
        if budget <= 0:
            raise PlanError(f"memory={memory!r}: give a size, such as '24GiB'")
        return budget
    if cluster.hardware is None:
        raise PlanError("this cluster has no device memory size: give memory='24GiB', or use Cluster.preset('8xH100')")
    return cluster.hardware.device_memory_nbytes


def limit_of(
    cluster: Cluster,
    memory: int | str | Memory | None,
    reserve: int | str | None = None,
    mesh: Mesh | None = None,
    stages: int = 1,
) -> int:
    """The bytes of a device that a plan on this mesh may use. Without a mesh nothing is reserved for communicators. Raises
    `FitError` if the reserve leaves nothing."""
    kept = reserved(cluster, memory, reserve, mesh, stages)
    return budget_of(cluster, memory) if kept is None else kept.limit_nbytes


def reserved(
    cluster: Cluster, memory: int | str | Memory | None, reserve: int | str | None, mesh: Mesh | None = None, stages: int = 1
) -> PlannedReserve | None:
    """What the budget keeps free of the plan, by part; None if nothing is to be reserved."""
    if reserve is None:
        return None
    budget, groups = budget_of(cluster, memory), () if mesh is None else groups_of(mesh, stages)
    if reserve == AUTO:
        limit = cluster.expected_reserve.live_nbytes(budget, groups)
        parts = cluster.expected_reserve.parts(max(limit, 0), groups)
    else:
        limit = budget - _size(reserve)
        parts = (ReservePart(name="reserve", nbytes=_size(reserve), source=GIVEN),)
    if limit <= 0:
        needed = sum(part.nbytes for part in parts)
        raise FitError(
            f"a device has a budget of {format_nbytes(budget)}, and beside the plan it needs {format_nbytes(needed)}: "
            f"{', '.join(map(str, parts))}. Nothing is left for the plan: give memory= of more than {format_least(needed)}, or a "
            "smaller reserve=; with reserve=None the budget is for live storages alone"
        )
    return PlannedReserve(budget_nbytes=budget, limit_nbytes=limit, parts=parts)


def budget_for(cluster: Cluster, nbytes: int, reserve: int | str | None, mesh: Mesh, stages: int = 1) -> int:
    """The least budget whose limit is so many bytes: the inverse of `limit_of`."""
    if reserve is None:
        return nbytes
    if reserve == AUTO:
        return cluster.expected_reserve.needed_nbytes(nbytes, groups_of(mesh, stages))
    return nbytes + _size(reserve)


def unfit(
    error: FitError, kept: PlannedReserve | None, cluster: Cluster, reserve: int | str | None, mesh: Mesh, stages: int = 1
) -> FitError:
    """The error of a search within the limit, which also names the budget and the reserve; `least_nbytes` is then a budget."""
    if kept is None:
        return error
    least = error.least_nbytes
    needed = None if least is None else budget_for(cluster, least, reserve, mesh, stages)
    more = "more memory=" if needed is None else f"memory='{format_least(needed)}' or more"
    return FitError(f"{error}. That limit is {kept}. Give {more}, or a smaller reserve=", least_nbytes=needed, tier=error.tier)


def check_reserve(reserve: int | str | None) -> None:
    """Raises `PlanError` unless it is None, "auto" or a size."""
    if reserve not in (None, AUTO):
        _size(reserve)


def _size(reserve: int | str | None) -> int:
    try:
        return parse_nbytes(reserve)  # type: ignore[arg-type]
    except ScrimpError as error:
        raise PlanError(f"reserve={reserve!r}: give None, 'auto', or a size such as '2GiB'; {error}") from None
