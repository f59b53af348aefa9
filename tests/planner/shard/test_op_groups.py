"""What a group may choose is right for each of its operators, by numbers: its atoms are the factors of their rules, cut up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from scrimp import zoo
from scrimp.capture import capture
from scrimp.capture.graph.graph import LayerGraph
from scrimp.layout import Mesh
from scrimp.planner.shard.op_groups import Group, Member, groups_of
from scrimp.planner.shard.options import splits
from scrimp.rules import Factor, Rule, check, rule_of

FOUR, EIGHT = Mesh({"x": 2, "y": 2}), Mesh({"x": 2, "y": 4})


class Cut(nn.Module):
    """A table of 32 rows that is seen as 4 x 8, and so are the 32 classes of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scales = nn.Parameter(torch.randn(32, 6)), nn.Parameter(torch.ones(4, 1, 1))
        self.head, self.groups = nn.Linear(6, 32), nn.Parameter(torch.ones(4, 1))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        table = (self.table.view(4, 8, 6) * self.scales).view(32, 6)
        scores = self.head(F.embedding(tokens, table))
        scores = (scores.view(12, 4, 8) * self.groups).view(12, 32)
        return F.cross_entropy(scores, labels)


def layers_of(model: nn.Module, batch: Sequence[Tensor]) -> Iterator[tuple[LayerGraph, dict[str, Rule], tuple[Group, ...]]]:
    for graph in capture(model, tuple(batch)).graphs:
        values = {value.name: value for value in graph.values}
        rules = {op.name: rule_of(op, values) for op in graph.ops}
        assert None not in rules.values()
        yield graph, rules, groups_of(graph, rules)  # type: ignore[misc]


def in_atoms(rule: Rule, member: Member, sizes: Sequence[int]) -> Rule:
    """The rule of an operator with the group's atoms for its factors."""
    kinds: dict[int, str] = {}
    for dims, made in (*zip(rule.inputs, member.inputs, strict=True), *zip(rule.outputs, member.outputs, strict=True)):
        for factors, atoms in zip(dims or (), made or (), strict=True):
            left = [*atoms]
            for factor in (rule.factors[k] for k in factors):
                taken: list[int] = []
                while prod(sizes[atom] for atom in taken) < factor.size:
                    taken.append(left.pop(0))
                assert prod(sizes[atom] for atom in taken) == factor.size
                assert {kinds.setdefault(atom, factor.kind) for atom in taken} <= {factor.kind}
            assert not left
    factors = tuple(Factor(size=size, kind=kinds.get(atom, "free")) for atom, size in enumerate(sizes))
    return Rule(factors=factors, inputs=member.inputs, outputs=member.outputs, linear=rule.linear)


def wrong(graph: LayerGraph, rules: dict[str, Rule], group: Group, mesh: Mesh) -> list[str]:
    """Of every way to split the group, what is not right for one of its operators."""
    values = {value.name: value for value in graph.values}
    found, tried = [], set()
    ways = [*splits(group, mesh)]
    for member in group.members:
        op = graph.ops[member.op]
        rule = in_atoms(rules[op.name], member, group.sizes)
        for way in ways:
            axes: dict[int, tuple[str, ...]] = {}
            for axis, atom in zip(mesh.names, way, strict=True):
                if atom in member.atoms and atom is not None:
                    axes[atom] = (*axes.get(atom, ()), axis)
            key = (member.op, tuple(sorted(axes.items())))
            if axes and key not in tried:
                tried.add(key)
                found += check(op, values, axes, mesh, rule=rule)
    return found


def test_what_must_be_a_range_is_one() -> None:
    """Members of a split table or loss reckon with where theirs begins: every eighth row is no range."""
    batch = (torch.randint(0, 32, (12,)), torch.randint(0, 32, (12,)))
    loose = 0
    for graph, rules, groups in layers_of(Cut(), batch):
        for group in groups:
            assert wrong(graph, rules, group, FOUR) == []
            assert wrong(graph, rules, group, Mesh({"x": 4, "y": 2})) == []
            loose += len(wrong(graph, rules, replace(group, ranges=()), FOUR))
        ranged = [group for group in groups if group.ranges]
        assert len(ranged) == 2  # the table's look-up, and the loss
        for group in ranged:
            (major, minor), *_ = group.ranges
            ways = [*splits(group, FOUR)]
            assert (group.sizes[major], group.sizes[minor]) == (4, 8)
            assert {way for way in ways if {*way} <= {major, None}} >= {(major, None), (None, major), (major, major)}
            assert not any(minor in way for way in ways)
            assert (major, minor) in [*splits(group, Mesh({"x": 4, "y": 2}))]  # all of the four, then of the eight
    assert loose > 0  # or there was nothing to be seen to


def test_every_way_to_split_a_group_is_right() -> None:
    for graph, rules, groups in layers_of(zoo.build("gpt-tiny"), zoo.example_batch("gpt-tiny", 4)):
        for group in groups:
            assert wrong(graph, rules, group, FOUR) == []


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in zoo.names() if "tiny" in name])
def test_every_way_to_split_a_group_is_right_on_another_mesh(name: str) -> None:
    for graph, rules, groups in layers_of(zoo.build(name), zoo.example_batch(name, 8)):
        for group in groups:
            assert wrong(graph, rules, group, EIGHT) == []
