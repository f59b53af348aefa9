"""One rank alone: the lowered program runs with a communicator that answers with zeros, and all live storages are counted."""

from __future__ import annotations

import torch

from scrimp import Plan
from scrimp.capture import Graph
from scrimp.layout import Mesh
from scrimp.lower import Arrived, lower
from scrimp.lower.moves import all_reduce
from scrimp.move import Program
from tests.support.lowering.run import metered

REST = {"bf16": (2, 0, 12), "megatron-bf16": (2, 4, 12), "fp32": (4, 4, 8)}  # weight, gradient, states of AdamW


class Alone:
    """Rank 0. A move without steps returns its input, as everywhere."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.rank = mesh, 0

    def move(self, program: Program, local: torch.Tensor, *, donate: bool) -> torch.Tensor:
        if not program.steps:
            return local
        return local.new_zeros(program.dst.local_shape(program.shape, self.mesh, self.rank))

    def start(self, program: Program, local: torch.Tensor, *, donate: bool) -> Arrived:
        return Arrived(self.move(program, local, donate=donate))

    def all_reduce(self, tensor: torch.Tensor, how: str, axes: tuple[str, ...]) -> torch.Tensor:
        return all_reduce(self, tensor, how, axes)


def rehearsed(plan: Plan, graph: Graph) -> int:
    """The peak of rank 0: what is at rest, and all that the step holds besides, but for moves under way."""
    lowered = lower(plan, graph)
    weight, gradient, states = REST[plan.precision]
    fixed = 0
    for each in lowered.rest.values():
        fixed += weight * each.numel(each.weight, plan.mesh)
        if each.trained:
            fixed += gradient * each.numel(each.gradient, plan.mesh) + states * each.numel(each.states, plan.mesh)
    known = {name: getattr(torch, dtype) for name, dtype in _dtypes(graph).items()}
    whole = {each.name: torch.zeros(each.shape, dtype=known.get(each.name, torch.float32)) for each in graph.parameters}
    batch = {value.name: torch.zeros(value.shape, dtype=getattr(torch, value.dtype)) for value in graph.batch}
    return fixed + metered(lowered, Alone(plan.mesh), whole, batch)[1].peak


def _dtypes(graph: Graph) -> dict[str, str]:
    return {
        of: value.dtype
        for layer in graph.layers
        for name, of in layer.parameters
        for value in graph.graphs[layer.graph].values
        if value.name == name
    }
