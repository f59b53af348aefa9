"""What a group of operators can choose: for each axis of the mesh the atom that it splits, or none.

A choice says where every tensor is: as the group makes it, and as the group needs what others make. Where one of its operators
needs the whole of what another left as parts of a sum, the sum is completed inside of the group, at the price of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from scrimp.capture import LayerGraph, Value
from scrimp.layout import Mesh
from scrimp.move import ITEMSIZE
from scrimp.planner.shard.op_groups import Dims, Group, Member
from scrimp.planner.shard.placement import Placed, placed

Split = tuple[int | None, ...]  # the atom of each axis, None if it splits nothing
Work = Callable[[float, float, str], float]  # seconds of so many operations over so many bytes of a type
Move = Callable[[Placed, Placed, int], float]  # seconds from one placement to another, for elements of so many bytes


@dataclass(frozen=True, kw_only=True)
class Option:
    """`made` and `needed`: by value. `work_seconds` are
    the operators' own, `talk_seconds` those of sums that are completed and of what operators say to each other inside;
    `again_seconds` both for the forward alone, were it to run again."""

    split: Split
    made: Mapping[str, Placed]
    needed: Mapping[str, Placed]
    work_seconds: float
    talk_seconds: float
    again_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.work_seconds + self.talk_seconds


def splits(group: Group, mesh: Mesh) -> Iterator[Split]:
    """All ways to give an atom to each axis: axes that share one must divide it together, and what must be a range stays one."""
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

    made: dict[str, Placed] = {}  # as others find it
    now: dict[str, Placed] = {}  # of what was made here, complete once somebody has needed it so
    needed: dict[str, Placed] = {}
    work_seconds = talk_seconds = again_seconds = 0.0
    for member in group.members:
        op, before = graph.ops[member.op], work_seconds + talk_seconds
        parts = [now[name].partial if name in now else () for name in op.inputs]
        through = _through(member, parts)
        for name, dims, partial in zip(op.inputs, member.inputs, parts, strict=True):
            if name not in now:
                needed.setdefault(name, place(dims))
            elif partial and not set(partial) <= set(through):
                talk_seconds += move(now[name], now[name].complete(), _itemsize(values[name]))
                made[name] = now[name] = now[name].complete()  # and so it is for everybody
        split_over = prod(sizes[axis] for atom in member.atoms for axis in axes.get(atom, ()))
        touched = 0
        for name, dims in zip(op.inputs, member.inputs, strict=True):
            touched += place(dims).numel(sizes) * _itemsize(values[name])
        alone = True  # nothing but views of its inputs
        for result, of_result in zip(op.outputs, member.outputs, strict=True):
            if result is None or of_result is None:
                continue
            inside = {atom for dim in of_result for atom in dim}
            summed = {axis for atom in member.sums - inside for axis in axes.get(atom, ())}
            made[result] = now[result] = place(of_result, (*{*summed, *through},))
            if values[result].storage == result:
                alone = False
                touched += now[result].numel(sizes) * _itemsize(values[result])
        if not alone:
            dtype = values[next(name for name in (*op.outputs, *op.inputs) if name is not None)].dtype
            work_seconds += work(op.flops / split_over, touched, dtype)
        for atom, of, itemsize, times in member.talks:
            if atom in axes:
                tensor = place(tuple((each,) for each in of), axes[atom])
                talk_seconds += times * move(tensor, tensor.complete(), itemsize)
        if not op.backward:
            again_seconds += work_seconds + talk_seconds - before
    return Option(
        split=split, made=made, needed=needed, work_seconds=work_seconds, talk_seconds=talk_seconds,
        again_seconds=again_seconds,
    )  # fmt: skip


def _through(member: Member, parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Axes over which its inputs are parts of sums in a way that it passes on."""
    having = frozenset(k for k, partial in enumerate(parts) if partial)
    if not having:
        return ()
    alike = {tuple(sorted(parts[k])) for k in having}
    return next(iter(alike)) if having in member.linear and len(alike) == 1 else ()


def _itemsize(value: Value) -> int:
    return ITEMSIZE[value.dtype]
