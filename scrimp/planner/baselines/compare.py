"""Compares a plan with known parallelisms on the same cluster; each baseline is a `Plan` of the same memory model.

ddp, zero-1, zero-2, zero-3     the batch over all devices; weights at rest sharded as by ZeRO's stages
tp, tp-sp, tp-sp-dist-opt       Megatron-LM's tensor parallelism, with its sequence parallelism, with its distributed optimizer;
                                the last axis of the mesh is tensor parallel, the others are data parallel
...-selective, ...-full         the same with Megatron-LM's selective or full recompute
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from scrimp.capture import Graph
from scrimp.cluster import Cluster
from scrimp.errors import PlanError
from scrimp.layout import Mesh
from scrimp.planner.answers.from_solution import plan_fields
from scrimp.planner.answers.plan import Plan
from scrimp.planner.answers.unsharded_ops import costs_of_whole
from scrimp.planner.api import PlanSource, Say, captured, planned_model
from scrimp.planner.baselines.starts import Known
from scrimp.planner.baselines.strategies import FULL, SELECTIVE, SHARED, SPLIT, Baseline
from scrimp.planner.cost.zero_levels import Precision, precision_of
from scrimp.planner.formulation.on_mesh import Layers, OnMesh
from scrimp.planner.solver.solve import TIME

Make = Callable[[Mesh], Baseline]


def _data(shared: int, recompute: str | None) -> Make:
    return lambda mesh: Baseline(dp=mesh.names, shared=shared, recompute=recompute)


def _tensor(sequence: bool, shared: int, recompute: str | None) -> Make:
    def make(mesh: Mesh) -> Baseline:
        *dp, tp = mesh.names
        if shared and not dp:
            raise PlanError(f"the mesh {mesh} has no data-parallel axis for a distributed optimizer")
        return Baseline(dp=tuple(dp), tp=tp, sequence=sequence, shared=shared, recompute=recompute)

    return make


DATA: Mapping[str, Make] = {
    f"{name}{suffix}": _data(shared, recompute)
    for suffix, recompute in {"": None, "-full": FULL}.items()
    for name, shared in SHARED.items()
}
TENSOR: Mapping[str, Make] = {
    f"{name}{suffix}": _tensor(sequence, shared, recompute)
    for suffix, recompute in {"": None, "-selective": SELECTIVE, "-full": FULL}.items()
    for name, (sequence, shared) in SPLIT.items()
}
BASELINES: Mapping[str, Make] = {**DATA, **TENSOR}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A baseline on a mesh: its plan, or why it has none."""

    name: str
    mesh: Mesh
    plan: Plan | None
    why: str = ""


class Drawn:
    """Plans of the baselines for one graph and cluster; baselines with the same splits share one assembly."""

    def __init__(self, graph: Graph, cluster: Cluster, precision: Precision, optimizer: str) -> None:
        self.graph, self.cluster, self.precision, self.optimizer = graph, cluster, precision, optimizer
        self._layers = Layers(graph)
        self._known: dict[Mesh, Known] = {}
        self._model = planned_model(graph)

    def plan(self, baseline: Baseline, mesh: Mesh, seconds: float = 60.0) -> Plan:
        """The baseline's plan, whether or not it fits; `PlanError` if this model does not support it."""
        if mesh not in self._known:
            self.cluster.axis_links(mesh)  # raises if it is too large
            self._known[mesh] = Known(OnMesh(self._layers, self.cluster, mesh), self.precision)
        drawn = self._known[mesh].drawn(baseline, seconds)
        assembly, problem, solution = drawn.assembly, drawn.problem, drawn.solution
        return Plan(
            mesh=mesh,
            cluster=self.cluster.to_json(),
            precision=self.precision.name,
            optimizer=self.optimizer,
            objective=TIME,
            **plan_fields(assembly, solution),
            model=self._model,
            whole=costs_of_whole(assembly, problem, solution, self.cluster.on(mesh).compute_seconds),
            source=PlanSource(graph=self.graph, assembly=assembly, problem=problem, solution=solution),
        )


def baseline_plan(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any],
    cluster: Cluster | str,
    name: str,
    *,
    mesh: Mesh | str,
    optimizer: str = "adamw",
    precision: str = "bf16",
    seconds: float = 60.0,
) -> Plan:
    """A baseline of `BASELINES`, as a plan; the solver chooses whatever the baseline leaves open to minimise time."""
    make = BASELINES.get(name)
    if make is None:
        raise PlanError(f"there is no baseline '{name}'; there are {', '.join(BASELINES)}")
    numbers = precision_of(precision, optimizer)
    if numbers is None:
        raise PlanError(f"precision={precision!r}, optimizer={optimizer!r}: one of them is not known")
    cluster = Cluster.preset(cluster) if isinstance(cluster, str) else cluster
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    baseline = make(mesh)
    return Drawn(captured(model, example_inputs, numbers), cluster, numbers, optimizer).plan(baseline, mesh, seconds)


def meshes_of(name: str, cluster: Cluster) -> tuple[Mesh, ...]:
    """All devices data parallel; or tensor parallel over 2, 4, 8... devices up to all of a node, and data parallel over the
    rest."""
    if cluster.hardware is None:
        raise PlanError("this cluster has no device data: use Cluster.preset('8xH100')")
    devices, inner = cluster.hardware.devices, cluster.hardware.devices_per_node
    if name in DATA:
        return (Mesh({"dp": devices}),)
    sizes = [size for size in (2**k for k in range(1, inner.bit_length())) if inner % size == 0]
    return tuple(Mesh({"dp": devices // size, "tp": size} if size < devices else {"tp": size}) for size in sizes)


def compare(
    plan: Plan, names: Iterable[str] = tuple(BASELINES), *, seconds: float = 60.0, say: Say | None = None
) -> list[Comparison]:
    """The baselines of the same model, batch, cluster and precision as `plan`, which this process must have planned."""
    if not isinstance(plan.source, PlanSource):
        raise PlanError("this plan was loaded from a file, which does not hold the model: plan again, then compare")
    precision = precision_of(plan.precision, plan.optimizer)
    assert precision is not None  # it was planned with it
    drawn = Drawn(plan.source.graph, Cluster.from_json(plan.cluster), precision, plan.optimizer)
    found = []
    for name in names:
        for mesh in meshes_of(name, drawn.cluster):
            if say is not None:
                say(f"{name} on the mesh {mesh}")
            try:
                found.append(Comparison(name=name, mesh=mesh, plan=drawn.plan(BASELINES[name](mesh), mesh, seconds)))
            except PlanError as error:
                found.append(Comparison(name=name, mesh=mesh, plan=None, why=str(error)))
    return found
