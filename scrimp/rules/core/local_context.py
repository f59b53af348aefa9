"""`Here`: one member of a mesh at one operator: its shard of each factor, and its communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from scrimp.layout import Mesh
from scrimp.rules.core.call import Call
from scrimp.rules.core.layouts import Split
from scrimp.rules.core.rule import SUM, Dims, Rule

AllReduce = Callable[[torch.Tensor, str, tuple[str, ...]], torch.Tensor]  # a tensor, "sum" or "max", over these axes
Draw = Callable[[tuple[tuple[str, int], ...]], torch.Generator]  # coordinates that distinguish draws -> generator


@dataclass(frozen=True, kw_only=True)
class Here:
    call: Call
    rule: Rule
    split: Split
    mesh: Mesh
    rank: int
    all_reduce: AllReduce
    draw: Draw

    def axes(self, factors: Iterable[int]) -> tuple[str, ...]:
        return tuple(axis for factor in factors for axis in self.split.get(factor, ()))

    def count(self, factors: Iterable[int]) -> int:
        """Over how many members these factors are split together."""
        return prod(map(self.mesh.axis_size, self.axes(factors)))

    def size(self, dim: Iterable[int]) -> int:
        """The local size of a dim with these factors."""
        dim = tuple(dim)
        return prod(self.rule.factors[factor].size for factor in dim) // self.count(dim)

    def start(self, dim: Sequence[int]) -> int:
        """The start of the local part of a dim."""
        place = 0
        for axis in self.axes(dim):
            place = place * self.mesh.axis_size(axis) + self.mesh.coordinate(self.rank, axis)
        return place * self.size(dim)

    def shape(self, dims: Dims | None) -> tuple[int, ...]:
        assert dims is not None
        return tuple(map(self.size, dims))

    def of(self, name: str) -> Dims:
        """The dims of a tensor argument."""
        index = self.call.at(name)
        assert index is not None, name
        return self.rule.inputs[index]

    def reduce(self, tensor: torch.Tensor, how: str, factors: Iterable[int]) -> torch.Tensor:
        """All-reduces over the members that split these factors; the tensor itself where none does."""
        axes = self.axes(factors)
        return self.all_reduce(tensor, how, axes) if axes else tensor

    def first(self, factors: Iterable[int]) -> bool:
        return all(self.mesh.coordinate(self.rank, axis) == 0 for axis in self.axes(factors))

    def summed(self, dims: Dims) -> list[int]:
        """The sum factors that a tensor of these dims lacks: an addend counts once, so only the first member along them
        adds it."""
        held = {factor for dim in dims for factor in dim}
        return [i for i, factor in enumerate(self.rule.factors) if factor.kind == SUM and i not in held]

    def generator(self, dims: Dims) -> torch.Generator:
        """For random numbers of these dims: each tile has its own generator, replicas share one."""
        axes = self.axes(factor for dim in dims for factor in dim)
        return self.draw(tuple((axis, self.mesh.coordinate(self.rank, axis)) for axis in sorted(axes)))


RuleOf = Callable[[Call], Rule | None]
Literals = Callable[[Here], dict[str, Any]]  # arguments with other local values
Runs = Callable[[Here, dict[str, Any]], tuple[Any, ...]]  # by name, tensors and local literals -> outputs


@dataclass(frozen=True, kw_only=True)
class Family:
    """Operators of one kind, by target. `addends`: an argument that is added once, so it is zero except on the first member of a
    split sum. `runs`: the local function, where it is not the operator itself with other literals."""

    rules: Mapping[str, RuleOf]
    literals: Mapping[str, Literals]
    addends: Mapping[str, str]
    runs: Mapping[str, Runs]


def family(
    rules: Mapping[str, RuleOf],
    *,
    literals: Mapping[str, Literals] | None = None,
    addends: Mapping[str, str] | None = None,
    runs: Mapping[str, Runs] | None = None,
) -> Family:
    return Family(rules=rules, literals=literals or {}, addends=addends or {}, runs=runs or {})
