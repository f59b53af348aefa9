"""`Plan.what_if`: the plan with another memory budget, or on another cluster, without capturing the model again.

With another budget the solver minimises seconds within it, warm-started from the plan. On another cluster the objective stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from scrimp.cluster import Cluster
from scrimp.errors import FitError, PlanError, ScrimpError
from scrimp.ledger import format_nbytes, parse_nbytes
from scrimp.planner.answers.from_solution import planned_anew
from scrimp.planner.answers.plan import Plan
from scrimp.planner.budget import budget_for, reserved, unfit
from scrimp.planner.deadline import Deadline
from scrimp.planner.solver.progress import in_words
from scrimp.planner.solver.solve import TIME, solve

Say = Callable[[str], None]

_NODES = re.compile(r"([+-])\s*([0-9]{1,9})\s*nodes?")
_DEVICES = re.compile(r"[0-9]+x\S+")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One of: `nodes` to add or remove, another `cluster`, or `nbytes` per device, relative if there is a `sign`."""

    nodes: int = 0
    cluster: Cluster | None = None
    nbytes: int = 0
    sign: str = ""


def change_of(text: str) -> Change:
    """Parses "+2GiB", "-4GiB", "24GiB", "-1 node", "+2 nodes" or "16xH100"."""
    text = text.strip()
    if match := _NODES.fullmatch(text):
        return Change(nodes=int(match[1] + match[2]))
    if _DEVICES.fullmatch(text):
        return Change(cluster=Cluster.preset(text))
    sign, size = (text[0], text[1:]) if text[:1] in ("+", "-") else ("", text)
    try:
        return Change(nbytes=parse_nbytes(size), sign=sign)
    except ScrimpError as error:
        raise PlanError(f"what if '{text}': write '+2GiB', '-4GiB', '24GiB', '-1 node' or '16xH100'; {error}") from error


def what_if(plan: Plan, change: str | Cluster, *, time_limit: float, gap: float, progress: Say | None) -> Plan:
    if plan.schedule is not None:
        raise PlanError("this plan has stages or micro-batches: plan again with another memory or cluster, and compare by `diff`")
    if plan.source is None or plan.source.again is None:
        raise PlanError("this plan was loaded from a file, which does not hold the model: plan again, then call what_if")
    source = Change(cluster=change) if isinstance(change, Cluster) else change_of(change)
    if source.cluster is not None:
        return _on(plan, source.cluster, time_limit, gap, progress)
    if source.nodes:
        return _on(plan, _with_nodes(plan, source.nodes), time_limit, gap, progress)
    return _within(plan, _limit(plan, source), time_limit, gap, progress)


def _with_nodes(plan: Plan, more: int) -> Cluster:
    cluster = Cluster.from_json(plan.cluster)
    assert cluster.hardware is not None  # every plan has hardware
    nodes, each = cluster.hardware.nodes, cluster.hardware.devices_per_node
    if nodes + more < 1:
        raise PlanError(f"what if {more} nodes: the plan is for {nodes} of {each} devices, and at least one must remain")
    return cluster.with_nodes(nodes + more)


def _limit(plan: Plan, change: Change) -> int:
    """The new budget, relative to the old budget if the objective was time, else to the peak with what is reserved beside it."""
    if not change.sign:
        return change.nbytes
    cluster = Cluster.from_json(plan.cluster)
    now = budget_for(cluster, plan.memory.peak_nbytes, plan.source.reserve, plan.mesh)
    if plan.objective == TIME and plan.source.problem.limit_nbytes is not None:
        now = plan.source.problem.limit_nbytes if plan.reserve is None else plan.reserve.budget_nbytes
    limit = now + change.nbytes if change.sign == "+" else now - change.nbytes
    if limit <= 0:
        raise PlanError(f"what if {format_nbytes(change.nbytes)} less: a device has {format_nbytes(now)} for this plan")
    return limit


def _on(plan: Plan, cluster: Cluster, time_limit: float, gap: float, progress: Say | None) -> Plan:
    """Plans on another cluster, on the same mesh if the user gave it and it uses all devices."""
    devices = None if cluster.hardware is None else cluster.hardware.devices
    mesh = plan.mesh if not plan.source.searched and plan.mesh.size == devices else None
    found: Plan = plan.source.again(cluster=cluster, mesh=mesh, time_limit=time_limit, gap=gap, progress=progress)
    return found


def _within(plan: Plan, budget: int, time_limit: float, gap: float, progress: Say | None) -> Plan:
    """On the plan's mesh, warm-started from its choice; also on others, if the planner chose the mesh or searched a subset of
    options."""
    source, say, deadline = plan.source, progress or (lambda words: None), Deadline.after(time_limit)
    further = source.searched or source.near
    found: list[Plan] = []
    trouble: FitError | None = None
    words, cluster, kept = in_words(say, f"on the mesh {plan.mesh}: "), Cluster.from_json(plan.cluster), None
    try:
        kept = reserved(cluster, budget, source.reserve, plan.mesh)
        problem = replace(source.problem, limit_nbytes=budget if kept is None else kept.limit_nbytes)
        half = time_limit / 2 if further else time_limit
        solution = solve(problem, objective=TIME, seconds=half, gap=gap, warm=source.solution.choice, progress=words)
        anew = planned_anew(plan, problem, solution, TIME, partial(source.again, memory=budget, objective=TIME))
        found.append(replace(anew, reserve=kept))
    except FitError as error:
        told = unfit(error, kept, cluster, source.reserve, plan.mesh)
        trouble = FitError(f"on the mesh {plan.mesh}: {told}", least_nbytes=told.least_nbytes)
    if further:
        try:
            found.append(source.again(memory=budget, objective=TIME, time_limit=deadline.left(), gap=gap, progress=progress))
        except FitError as error:
            trouble = error
    if not found:
        assert trouble is not None
        raise trouble
    return min(found, key=lambda each: (each.seconds, each.memory.peak_nbytes))
