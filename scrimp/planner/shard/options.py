"""The sharding options of an operator group: for each mesh axis the atom that it splits, or none.

An option fixes the placement of every tensor: of those the group makes, and of those it needs from others. Where one of its
operators needs the full value of another's partial sum, the group all-reduces it, and the option has that cost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from scrimp.capture import LayerGraph, Value
from scrimp.layout import Mesh
from scrimp.move import ITEMSIZE
from scrimp.planner.cost.operator_work import work_of
from scrimp.planner.shard.op_groups import Dims, Group
from scrimp.planner.shard.placement import Placed, placed

Split = tuple[int | None, ...]  # the atom of each axis, None if it splits nothing
Work = Callable[[float, float, str, str], float]  # seconds of so many FLOPs, bytes, of a dtype and a class of operators
Move = Callable[[Placed, Placed, int], float]  # seconds from one placement to another, for elements of so many bytes


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option. `made` and `needed`: placements by value. `work_seconds`: of the operators; `talk_seconds`: of communication
    inside the group; `again_seconds`: both for a recompute of the forward. By operator: `staging`, bytes that reducing its inputs
    takes before it runs; `scratch`, bytes that it takes while it runs, beyond inputs and outputs."""

    split: Split
    made: Mapping[str, Placed]
    needed: Mapping[str, Placed]
    work_seconds: float
    talk_seconds: float
    again_seconds: float = 0.0
    staging: Mapping[int, int] = field(default_factory=dict)
    scratch: Mapping[int, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.work_seconds + self.talk_seconds


def splits(group: Group, mesh: Mesh) -> Iterator[Split]:
    """All assignments of an atom to each axis: axes that share an atom must divide it together, and `ranges` stay contiguous."""
    choices = [
        [None, *(k for k, size in enumerate(group.sizes) if group.may_split[k] and size % length == 0)] for _, length in mesh.axes
    ]
    for split in product(*choices):
        lengths: dict[int, int] = {}
        for (_, length), atom in zip(mesh.axes, split, strict=True):
            if atom is not None:
                lengths[atom] = lengths.get(atom, 1) * length
        if all(group.sizes[atom] % length == 0 for atom, length in lengths.items()) and group.keeps_ranges(lengths):
            yield split


def option(graph: LayerGraph, group: Group, mesh: Mesh, split: Split, work: Work, move: Move) -> Option:
    values = {value.name: value for value in graph.values}
    axes: dict[int, tuple[str, ...]] = {}
    for name, atom in zip(mesh.names, split, strict=True):
        if atom is not None:
            axes[atom] = (*axes.get(atom, ()), name)
    sizes = dict(mesh.axes)

    def place(dims: Dims, partial: Sequence[str] = ()) -> Placed:
        return placed([[(group.sizes[atom], axes.get(atom, ())) for atom in dim] for dim in dims], partial)

    made: dict[str, Placed] = {}  # as other groups find it
    now: dict[str, Placed] = {}  # of values made here, reduced once an operator needed that
    needed: dict[str, Placed] = {}
    work_seconds = talk_seconds = again_seconds = 0.0
    staging: dict[int, int] = {}
    scratch: dict[int, int] = {}
    for member in group.members:
        op, before = graph.ops[member.op], work_seconds + talk_seconds
        parts = [now[name].partial if name in now else () for name in op.inputs]
        through = passed_on(member.linear, parts)
        for name, dims, partial in zip(op.inputs, member.inputs, parts, strict=True):
            if name not in now:
                needed.setdefault(name, place(dims))
            elif partial and not set(partial) <= set(through):
                talk_seconds += move(now[name], now[name].complete(), _itemsize(values[name]))
                # The summands of an all-reduce are as large as the tensor.
                staging[member.op] = max(staging.get(member.op, 0), now[name].numel(sizes) * _itemsize(values[name]))
                made[name] = now[name] = now[name].complete()  # from here on it is reduced for all users
        for result, of_result in zip(op.outputs, member.outputs, strict=True):
            if result is None or of_result is None:
                continue
            inside = {atom for dim in of_result for atom in dim}
            summed = {axis for atom in member.sums - inside for axis in axes.get(atom, ())}
            made[result] = now[result] = place(of_result, (*{*summed, *through},))
        results = [
            None if name is None or dims is None else now[name] for name, dims in zip(op.outputs, member.outputs, strict=True)
        ]
        split_over = [axis for atom in member.atoms for axis in axes.get(atom, ())]
        besides = 0
        for when, of, itemsize, traffic in member.scratch:
            if any(atom in axes for atom in when):
                numel = place(tuple((each,) for each in of)).numel(sizes)
                besides += numel * traffic
                scratch[member.op] = scratch.get(member.op, 0) + numel * itemsize
        needs = [place(dims) for dims in member.inputs]
        for each in work_of(op, values, needs, results, split_over, sizes, besides):
            work_seconds += work(each.flops, each.nbytes, each.dtype, each.operators)
        for atom, of, itemsize, times in member.talks:
            if atom in axes:
                tensor = place(tuple((each,) for each in of), axes[atom])
                talk_seconds += times * move(tensor, tensor.complete(), itemsize)
        if not op.backward:
            again_seconds += work_seconds + talk_seconds - before
    return Option(
        split=split, made=made, needed=needed, work_seconds=work_seconds, talk_seconds=talk_seconds,
        again_seconds=again_seconds, staging=staging, scratch=scratch,
    )  # fmt: skip


def passed_on(linear: Collection[frozenset[int]], parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Axes along which an operator's inputs are partial sums that it passes on. `parts`: those of each input."""
    having = frozenset(k for k, partial in enumerate(parts) if partial)
    if not having:
        return ()
    alike = {tuple(sorted(parts[k])) for k in having}
    return next(iter(alike)) if having in linear and len(alike) == 1 else ()


def _itemsize(value: Value) -> int:
    return ITEMSIZE[value.dtype]
