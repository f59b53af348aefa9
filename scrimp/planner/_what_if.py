"""What a plan would be with other memory, or on other machines. The model is not captured again.

More memory buys time: with another budget the least seconds within it are asked for, beginning from what is known. On other
machines the same is asked for as before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from scrimp.cluster import Cluster
from scrimp.errors import FitError, PlanError, ScrimpError
from scrimp.ledger import format_nbytes, parse_nbytes
from scrimp.planner._answer import planned_again
from scrimp.planner._plan import Plan
from scrimp.planner._progress import in_words
from scrimp.planner._solve import TIME, solve

Say = Callable[[str], None]

_NODES = re.compile(r"([+-])\s*([0-9]+)\s*nodes?")
_DEVICES = re.compile(r"[0-9]+x\S+")
_SIGNED = re.compile(r"([+-])\s*(.+)")


def what_if(plan: Plan, change: str | Cluster, *, seconds: float, gap: float, progress: Say | None) -> Plan:
    """`change`: "+2GiB" or "-4GiB" of a device's memory, "24GiB" of it, "-1 node", "+2 nodes", "16xH100", or a cluster."""
    if plan.asked is None or plan.asked.again is None:
        raise PlanError("this plan was loaded, and what it was made from is not in the file: plan again, then ask what if")
    if isinstance(change, Cluster):
        return _on(plan, change, seconds, gap, progress)
    text = change.strip()
    if match := _NODES.fullmatch(text):
        return _on(plan, _with_nodes(plan, int(match[1] + match[2])), seconds, gap, progress)
    if _DEVICES.fullmatch(text):
        return _on(plan, Cluster.preset(text), seconds, gap, progress)
    return _within(plan, _limit(plan, text), seconds, gap, progress)


def _with_nodes(plan: Plan, more: int) -> Cluster:
    cluster = Cluster.from_json(plan.cluster)
    assert cluster.hardware is not None  # or there were no plan
    nodes = cluster.hardware.nodes + more
    if nodes < 1:
        raise PlanError(
            f"{-more} nodes less: the plan is for {cluster.hardware.nodes} of {cluster.hardware.devices_per_node} devices"
        )
    return cluster.with_nodes(nodes)


def _limit(plan: Plan, text: str) -> int:
    """More or less than it may take, where it was to be fast; else than it takes."""
    match = _SIGNED.fullmatch(text)
    try:
        nbytes = parse_nbytes(match[2] if match else text)
    except ScrimpError as error:
        raise PlanError(f"what if '{text}': write '+2GiB', '24GiB', '-1 node' or '16xH100'; {error}") from error
    if match is None:
        return nbytes
    now = plan.memory.peak_nbytes
    if plan.objective == TIME and plan.asked.problem.limit_nbytes is not None:
        now = plan.asked.problem.limit_nbytes
    limit = now + nbytes if match[1] == "+" else now - nbytes
    if limit <= 0:
        raise PlanError(f"what if '{text}': a device has {format_nbytes(now)} for this plan, there is nothing left")
    return limit


def _on(plan: Plan, cluster: Cluster, seconds: float, gap: float, progress: Say | None) -> Plan:
    """A mesh that was given stays if it has all devices."""
    devices = None if cluster.hardware is None else cluster.hardware.devices
    mesh = plan.mesh if not plan.asked.searched and plan.mesh.size == devices else None
    found: Plan = plan.asked.again(cluster=cluster, mesh=mesh, seconds=seconds, gap=gap, progress=progress)
    return found


def _within(plan: Plan, limit: int, seconds: float, gap: float, progress: Say | None) -> Plan:
    """On the mesh of the plan, from what is known of it; and on others, if the mesh was searched for."""
    asked, say = plan.asked, progress or (lambda words: None)
    found: list[Plan] = []
    trouble: FitError | None = None
    problem = replace(asked.problem, limit_nbytes=limit)
    words = in_words(say, f"on the mesh {plan.mesh}: ")
    try:
        solution = solve(problem, objective=TIME, seconds=seconds, gap=gap, warm=asked.solution.choice, progress=words)
        found.append(planned_again(plan, problem, solution, TIME, partial(asked.again, budget=limit, objective=TIME)))
    except FitError as error:
        trouble = FitError(f"on the mesh {plan.mesh}: {error}", least_nbytes=error.least_nbytes)
    if asked.searched:
        try:
            found.append(asked.again(budget=limit, objective=TIME, seconds=seconds, gap=gap, progress=progress))
        except FitError as error:
            trouble = error
    if not found:
        assert trouble is not None
        raise trouble
    return min(found, key=lambda each: (each.seconds, each.memory.peak_nbytes))
