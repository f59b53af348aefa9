"""Groups operators that are sharded alike, so that each group is one choice.

A forward operator and the backward operators that autograd made of it have the same factors, and are sharded the same way. That
is what tensor, data and sequence parallelism have in common. Views, casts and element-wise operators join the group that makes
their input, unless that input may be a partial sum, which can be reduced in more than one way. A few choices a layer remain:
matmuls, norms, attention, additions of two branches, the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul

from scrimp.capture import LayerGraph, Op, Value
from scrimp.planner.shard.dim_atoms import Atoms
from scrimp.rules import FREE, SUM, WHOLE, Factor, Rule

Dims = tuple[tuple[int, ...], ...]  # of each dim its atoms, by index in the group


@dataclass(frozen=True, kw_only=True)
class Member:
    """An operator in its group: dims of its tensors in the group's atoms; the atoms it sums over; communication inside the
    operator, as (atom, atoms of the tensor sent, bytes of an element, times). `factors`: the atoms of each factor of its rule.
    `ruled`: it has a sharding rule."""

    op: int
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    linear: tuple[frozenset[int], ...]
    sums: frozenset[int]
    talks: tuple[tuple[int, tuple[int, ...], int, int], ...]
    factors: tuple[tuple[int, ...], ...] = ()
    # Atoms when split, atoms of the tensor, bytes that it holds per element, and bytes that it reads and writes besides.
    scratch: tuple[tuple[tuple[int, ...], tuple[int, ...], int, int], ...] = ()
    ruled: bool = True

    @property
    def atoms(self) -> frozenset[int]:
        """All atoms of its work."""
        return frozenset(atom for dims in (*self.inputs, *self.outputs) if dims is not None for dim in dims for atom in dim)


@dataclass(frozen=True, kw_only=True)
class Group:
    """`sizes` of its atoms, and which of them `may_split`. `ranges`: atoms, major first, of which a device must hold a contiguous
    range, because an operator needs its start: rows of an embedding table, classes of a loss."""

    name: str
    members: tuple[Member, ...]
    sizes: tuple[int, ...]
    may_split: tuple[bool, ...]
    ranges: tuple[tuple[int, ...], ...] = ()

    def keeps_ranges(self, devices: Mapping[int, int]) -> bool:
        """Whether all `ranges` stay contiguous, if atoms are split over so many devices. Of 4 x 8 rows, those at the same place
        in every eight are not contiguous: an atom may be split only if the ones before it are split completely."""
        for atoms in self.ranges:
            split = [atom for atom in atoms if devices.get(atom, 1) > 1]
            before = atoms[: atoms.index(split[-1])] if split else ()
            if any(devices.get(atom, 1) != self.sizes[atom] for atom in before):
                return False
        return True


def groups_of(graph: LayerGraph, rules: Mapping[str, Rule | None]) -> tuple[Group, ...]:
    """The groups, in the order of their first operators. `rules`: by operator name; an operator without a rule stays
    unsharded."""
    values = {value.name: value for value in graph.values}
    of_op = [rules[op.name] or kept_whole(op, values) for op in graph.ops]
    found: dict[int, list[int]] = {}
    for index, leader in enumerate(_leaders(graph, of_op)):
        found.setdefault(leader, []).append(index)
    known: dict[str, list[list[int]]] = {}  # of values so far, the factor sizes of their dims
    groups = (_group(graph, members, of_op, known) for members in found.values())
    return tuple(replace(group, members=tuple(_marked(graph, rules, group))) for group in groups)


def _marked(graph: LayerGraph, rules: Mapping[str, Rule | None], group: Group) -> Iterator[Member]:
    return (replace(member, ruled=rules[graph.ops[member.op].name] is not None) for member in group.members)


def kept_whole(op: Op, values: Mapping[str, Value]) -> Rule:
    factors: list[Factor] = []

    def dims(name: str) -> tuple[tuple[int, ...], ...]:
        factors.extend(Factor(size=size, kind=WHOLE) for size in values[name].shape)
        return tuple((k,) for k in range(len(factors) - len(values[name].shape), len(factors)))

    inputs = tuple(dims(name) for name in op.inputs)
    outputs = tuple(None if name is None else dims(name) for name in op.outputs)
    return Rule(factors=tuple(factors), inputs=inputs, outputs=outputs)


def follows(rule: Rule) -> bool:
    """Whether the operator passes on its input, partial sums included: a view, a cast."""
    return len(rule.inputs) == 1 and frozenset({0}) in rule.linear and all(factor.kind == FREE for factor in rule.factors)


def _leaders(graph: LayerGraph, rules: Sequence[Rule]) -> list[int]:
    """The first operator of each operator's group."""
    leader = list(range(len(graph.ops)))

    def find(index: int) -> int:
        while leader[index] != index:
            index = leader[index]
        return index

    def join(one: int, other: int) -> None:
        first, second = sorted((find(one), find(other)))
        leader[second] = first

    made = {name: k for k, op in enumerate(graph.ops) for name in op.outputs if name is not None}
    of_cell: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        join(index, of_cell.setdefault(op.cell, index))
    summed: set[str] = set()  # values that may be partial sums
    users: dict[str, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for name in op.inputs:
            users.setdefault(name, []).append(index)
    for index, op in enumerate(graph.ops):
        rule = rules[index]
        if any(factor.kind == SUM for factor in rule.factors) or (follows(rule) and summed & {*op.inputs}):
            summed |= {name for name in op.outputs if name is not None}
        if op.backward:
            continue  # it is in the group of its forward
        sources = [made[name] for name in op.inputs if name in made]
        if not sources:
            # A view of a weight joins its user, as does a value without inputs.
            behind = [
                user for name in op.outputs if name is not None for user in users.get(name, []) if not graph.ops[user].backward
            ]
            if behind and (follows(rule) or not op.inputs):
                join(index, behind[0])
            continue
        if follows(rule) or (
            all(factor.kind == FREE for factor in rule.factors)
            and len({find(source) for source in sources}) == 1
            and not summed & {*op.inputs}
        ):
            join(index, sources[0])
    return [find(index) for index in range(len(graph.ops))]


def _group(graph: LayerGraph, indices: Sequence[int], rules: Sequence[Rule], known: dict[str, list[list[int]]]) -> Group:
    """`known`: rows that elsewhere are factored as batch times sequence are factored so here too."""
    atoms, seen = Atoms(), {}  # type: ignore[var-annotated]
    own = {index: [atoms.new(factor.size, whole=factor.kind == WHOLE) for factor in rules[index].factors] for index in indices}

    def see(name: str, dims: Sequence[Sequence[int]]) -> None:
        for one, other in zip(seen.setdefault(name, dims), dims, strict=True):
            if one and other:  # a dim of 1 has no atoms
                atoms.unify(one, other)

    for index in indices:
        op, rule = graph.ops[index], rules[index]
        for name, dims in zip(op.inputs, rule.inputs, strict=True):
            see(name, [[own[index][k] for k in dim] for dim in dims])
        for result, made in zip(op.outputs, rule.outputs, strict=True):
            if result is not None and made is not None:
                see(result, [[own[index][k] for k in dim] for dim in made])
    for name, gradient in (*graph.gradients, *graph.tangents):
        if name in seen and gradient in seen:
            see(gradient, seen[name])
    for one, other in _mirrored(graph, indices):
        here = {atom for dim in seen[other] for atom in atoms.of(dim)}
        ahead = {atom for k in indices if not graph.ops[k].backward for atom in atoms.of(own[k])}
        if not here & ahead:  # no earlier member has factored them
            see(other, seen[one])
    for name, dims in seen.items():
        for dim, cuts in zip(dims, known.get(name, ()), strict=False):
            if _nests([atoms.size(atom) for atom in atoms.of(dim)], cuts):
                atoms.unify(dim, [atoms.new(size) for size in cuts])
    known.update({name: [[atoms.size(atom) for atom in atoms.of(dim)] for dim in dims] for name, dims in seen.items()})
    numbers = {atom: k for k, atom in enumerate(dict.fromkeys(a for index in indices for a in atoms.of(own[index])))}

    def numbered(index: int, factors: Sequence[int]) -> tuple[int, ...]:
        return tuple(numbers[atom] for atom in atoms.of(own[index][k] for k in factors))

    ranges = dict.fromkeys(
        numbered(index, [k]) for index in indices for k, factor in enumerate(rules[index].factors) if factor.ranged
    )
    members = []
    for index in indices:
        rule = rules[index]
        sums = [k for k, factor in enumerate(rule.factors) if factor.kind == SUM]
        members.append(
            Member(
                op=index,
                inputs=tuple(tuple(numbered(index, dim) for dim in dims) for dims in rule.inputs),
                outputs=tuple(None if dims is None else tuple(numbered(index, dim) for dim in dims) for dims in rule.outputs),
                linear=rule.linear,
                sums=frozenset(numbered(index, sums)),
                talks=tuple(
                    (atom, numbered(index, talk.of), talk.itemsize, talk.times)
                    for talk in rule.talks
                    for atom in numbered(index, [talk.factor])
                ),
                factors=tuple(numbered(index, [k]) for k in range(len(rule.factors))),
                scratch=tuple(
                    (
                        numbered(index, each.when),
                        numbered(index, each.of),
                        each.itemsize * each.times,
                        each.itemsize * each.traffic,
                    )
                    for each in rule.scratch
                ),
            )
        )
    first = graph.ops[_heaviest(graph, indices)]
    kept = [*numbers]
    twice = {atom for member in members for dims in (*member.inputs, *member.outputs) for atom in _twice(dims)}
    return Group(
        name=f"{first.where.split(':')[0]}:{first.target.split('.')[1]}",
        members=tuple(members),
        ranges=tuple(each for each in ranges if len(each) > 1),
        sizes=tuple(atoms.size(atom) for atom in kept),
        may_split=tuple(not atoms.whole(atom) and k not in twice for k, atom in enumerate(kept)),
    )


def _twice(dims: Dims | None) -> Iterator[int]:
    """Atoms that a tensor has in two dims, as a table of all pairs of positions has: no axis can split both."""
    every = [atom for dim in dims or () for atom in dim]
    return (atom for atom in every if every.count(atom) > 1)


def _nests(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the two factorings have a common refinement: at each cut of one, the parts before it divide the other's there."""
    edges = [[*accumulate(sizes, mul)] for sizes in (one, other)]
    every = sorted({*edges[0], *edges[1]})
    return edges[0][-1:] == edges[1][-1:] and all(b % a == 0 for a, b in pairwise(every))


def _mirrored(graph: LayerGraph, indices: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Pairs of forward tensors and backward tensors of the same shape that look like their gradients: an operator's output and
    its backward's input, and vice versa."""
    shapes = {value.name: value.shape for value in graph.values}
    cells: dict[int, list[int]] = {}
    for index in indices:
        cells.setdefault(graph.ops[index].cell, []).append(index)
    for cell in cells.values():
        ahead = [graph.ops[k] for k in cell if not graph.ops[k].backward]
        behind = [graph.ops[k] for k in cell if graph.ops[k].backward]
        given = [name for op in ahead for name in op.outputs if name is not None]
        got = [name for op in ahead for name in op.inputs]
        for op in behind:
            for names, pool in ((op.inputs, given), (op.outputs, got)):
                for name in names:
                    match = next((other for other in pool if name is not None and shapes[other] == shapes[name]), None)
                    if match is not None and name is not None and name != match:
                        yield match, name


def _heaviest(graph: LayerGraph, indices: Sequence[int]) -> int:
    """The operator that names a group: the one with the most work, in the forward if it has any."""
    return max(indices, key=lambda index: (not graph.ops[index].backward, graph.ops[index].flops, -index))
