"""One class of layers, prepared for planning: makers and users of each tensor, lifetimes, and sharding options of its groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from scrimp.capture import BORDER, MADE, PARAMETER, LayerGraph, Value
from scrimp.planner.shard.op_groups import Group, groups_of
from scrimp.planner.shard.options import Option
from scrimp.rules import Rule

Span = tuple[int, int]  # first and last operator, by index


@dataclass(frozen=True, kw_only=True)
class Use:
    """One group's use of another group's value: operators in the forward, and in the backward. An operator that makes a view of
    the value uses it as long as anybody reads the view: a resharded copy stays so long. The backward makes the view anew."""

    group: int
    forward: Span | None
    backward: Span | None

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(span for span in (self.forward, self.backward) if span is not None)


@dataclass(frozen=True, kw_only=True)
class Read:
    """An operator reads a storage, or a view of it. `value`: the first value on the way from the storage to the operator that
    another group than its maker's reads, by operator `at` of `group`: there it may be resharded, and what is read from there on
    is the copy. None if there is no such value."""

    op: int
    value: str | None = None
    group: int | None = None
    at: int = 0


@dataclass(frozen=True, kw_only=True)
class LayerModel:
    """`makers`: the group that makes each value. `uses`: by value, of groups other than its maker. `lives`: of each storage made
    here, from the operator that makes it to the last that reads it or a view of it; `reads`: all that read it."""

    graph: LayerGraph
    groups: tuple[Group, ...]
    options: tuple[tuple[Option, ...], ...]
    values: Mapping[str, Value]
    makers: Mapping[str, int]
    uses: Mapping[str, tuple[Use, ...]]
    lives: Mapping[str, Span]
    reads: Mapping[str, tuple[int, ...]]

    @cached_property
    def forward_ops(self) -> int:
        return sum(1 for op in self.graph.ops if not op.backward)

    @cached_property
    def storage_reads(self) -> Mapping[str, tuple[Read, ...]]:
        """By storage made here, all reads of it and of its views."""
        group_of = {member.op: k for k, group in enumerate(self.groups) for member in group.members}
        producer = {name: k for k, op in enumerate(self.graph.ops) for name in op.outputs if name is not None}
        found: dict[str, list[Read]] = {}
        for k, op in enumerate(self.graph.ops):
            for name in dict.fromkeys(op.inputs):
                root = self.values[name].storage
                if self.values[root].kind != MADE:
                    continue
                read, at, value = Read(op=k), k, name
                while True:  # towards the storage: the crossing next to it counts
                    if group_of[at] != self.makers[value]:
                        read = Read(op=k, value=value, group=group_of[at], at=at)
                    if value == root:
                        break
                    at = producer[value]
                    value = self.graph.ops[at].inputs[0]
                found.setdefault(root, []).append(read)
        return {root: tuple(reads) for root, reads in found.items()}

    @property
    def borders(self) -> tuple[str, ...]:
        """Inputs that come from other layers or from the batch, in the order of `Layer.inputs`."""
        return tuple(name for name in self.graph.inputs if self.values[name].kind == BORDER)

    @property
    def weights(self) -> tuple[str, ...]:
        """Parameters used here."""
        return tuple(value.name for value in self.graph.values if value.kind == PARAMETER and value.name in self.uses)


def model_of(graph: LayerGraph, rules: Mapping[str, Rule | None]) -> LayerModel:
    """Without options: those depend on the mesh."""
    groups = groups_of(graph, rules)
    values = {value.name: value for value in graph.values}
    group_of = {member.op: k for k, group in enumerate(groups) for member in group.members}
    makers = {name: group_of[k] for k, op in enumerate(graph.ops) for name in op.outputs if name is not None}
    readers: dict[str, list[int]] = {}
    for k, op in enumerate(graph.ops):
        for name in dict.fromkeys(op.inputs):
            readers.setdefault(name, []).append(k)
    uses: dict[str, tuple[Use, ...]] = {}
    for name, found in readers.items():
        by_group: dict[int, list[int]] = {}
        for k in found:
            if group_of[k] != makers.get(name):
                by_group.setdefault(group_of[k], []).extend(_with_views(graph, values, readers, k))
        uses[name] = tuple(_use(graph, group, ops) for group, ops in by_group.items())
    lives: dict[str, Span] = {}
    reads: dict[str, tuple[int, ...]] = {}
    for k, op in enumerate(graph.ops):
        for each in (*op.outputs, *op.inputs):
            if each is not None and values[values[each].storage].kind == MADE:
                root = values[each].storage
                lives[root] = (lives.get(root, (k, k))[0], k)
        for root in {values[name].storage for name in op.inputs}:
            reads[root] = (*reads.get(root, ()), k)
    return LayerModel(
        graph=graph, groups=groups, options=(), values=values, makers=makers,
        uses={name: found for name, found in uses.items() if found}, lives=lives, reads=reads,
    )  # fmt: skip


def _with_views(graph: LayerGraph, values: Mapping[str, Value], readers: Mapping[str, Sequence[int]], op: int) -> Iterator[int]:
    """The operator, and all that read views which it makes."""
    yield op
    for name in graph.ops[op].outputs:
        if name is not None and values[name].storage != name:
            for reader in readers.get(name, ()):
                yield from _with_views(graph, values, readers, reader)


def _use(graph: LayerGraph, group: int, ops: list[int]) -> Use:
    forward = sorted(k for k in ops if not graph.ops[k].backward)
    backward = sorted(k for k in ops if graph.ops[k].backward)
    return Use(
        group=group,
        forward=(forward[0], forward[-1]) if forward else None,
        backward=(backward[0], backward[-1]) if backward else None,
    )
