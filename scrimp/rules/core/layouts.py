"""Computes layouts from a rule and a choice. A choice gives the mesh axes that split each factor, major axis first, and for each
axis whether inputs are partial sums along it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from scrimp.layout import Layout, Mesh
from scrimp.rules.core.rule import FREE, SUM, WHOLE, Dims, Factor, Rule

Split = Mapping[int, tuple[str, ...]]  # by factor: its axes, major first
Sums = Mapping[str, int]  # by axis: which of the rule's `linear` sets of inputs is a partial sum along it


def may_split(factor: Factor, members: int) -> bool:
    """The only place that decides this: shards must be equal, so the number of members divides the size."""
    return members == 1 or (factor.kind != WHOLE and factor.size > 0 and factor.size % members == 0)


def fits(rule: Rule, split: Split, mesh: Mesh) -> bool:
    """Whether every factor may be split as the choice says."""
    return all(may_split(rule.factors[factor], prod(map(mesh.axis_size, axes))) for factor, axes in split.items())


def layouts(rule: Rule, split: Split, sums: Sums | None = None) -> tuple[tuple[Layout, ...], tuple[Layout | None, ...]]:
    """The layouts of inputs and outputs, each for its `factored_shape`."""
    sums = sums or {}
    inputs = tuple(
        _layout(dims, split, [axis for axis, chosen in sums.items() if index in rule.linear[chosen]])
        for index, dims in enumerate(rule.inputs)
    )
    outputs = tuple(None if dims is None else _layout(dims, split, [*sums, *_summed(rule, dims, split)]) for dims in rule.outputs)
    return inputs, outputs


def factored_shape(rule: Rule, dims: Dims) -> tuple[int, ...]:
    """One size for each factor of each dim; a dim without factors has one of 1."""
    return tuple(size for dim in dims for size in ([rule.factors[factor].size for factor in dim] or [1]))


def shape(rule: Rule, dims: Dims) -> tuple[int, ...]:
    return tuple(prod(rule.factors[factor].size for factor in dim) for dim in dims)


def choices(rule: Rule, mesh: Mesh, axis: str) -> Iterator[int]:
    """The factors that one axis alone may split."""
    return (index for index, factor in enumerate(rule.factors) if may_split(factor, mesh.axis_size(axis)))


def refine(rule: Rule, factor: int, sizes: Sequence[int]) -> Rule | None:
    """The same rule with a factor split into a product, major one first, which keeps its index: the rows of a matrix as batch
    times sequence. None where that is impossible: the factor must be a range, or the sizes do not match."""
    old = rule.factors[factor]
    if old.ranged or prod(sizes) != old.size:
        return None
    parts = (factor, *range(len(rule.factors), len(rule.factors) + len(sizes) - 1))

    def refined(dims: Dims) -> Dims:
        return tuple(tuple(part for each in dim for part in (parts if each == factor else (each,))) for dim in dims)

    factors = [*rule.factors, *(replace(old, size=size) for size in sizes[1:])]
    factors[factor] = replace(old, size=sizes[0])
    talks = tuple(replace(talk, of=refined((talk.of,))[0]) for talk in rule.talks)
    return Rule(
        factors=tuple(factors),
        inputs=tuple(map(refined, rule.inputs)),
        outputs=tuple(None if dims is None else refined(dims) for dims in rule.outputs),
        linear=rule.linear,
        talks=tuple(
            replace(talk, factor=part) for talk in talks for part in (parts if talk.factor == factor else (talk.factor,))
        ),
        scratch=tuple(replace(each, when=refined((each.when,))[0], of=refined((each.of,))[0]) for each in rule.scratch),
    )


def _summed(rule: Rule, dims: Dims, split: Split) -> list[str]:
    held = {factor for dim in dims for factor in dim}
    return [axis for factor, axes in split.items() if rule.factors[factor].kind == SUM and factor not in held for axis in axes]


def _layout(dims: Dims, split: Split, partial: Sequence[str]) -> Layout:
    entries = tuple(tuple(split.get(factor, ())) for dim in dims for factor in dim or (-1,))
    return Layout(dims=entries, partial=tuple(partial), factors=tuple(max(1, len(dim)) for dim in dims))


def faults(rule: Rule, shapes: Sequence[Sequence[int]], made: Sequence[Sequence[int] | None]) -> list[str]:
    """The internal faults of a rule: factor sizes that do not match the tensors, a `Talk` of a factor that is not "inside"."""
    found = []
    for what, all_dims, all_shapes in (("input", rule.inputs, shapes), ("output", rule.outputs, made)):
        for index, (dims, wanted) in enumerate(zip(all_dims, all_shapes, strict=True)):
            if dims is not None and wanted is not None and shape(rule, dims) != tuple(wanted):
                found.append(f"{what} {index} has the shape {tuple(wanted)}, its factors make {shape(rule, dims)}")
    for talk in rule.talks:
        if rule.factors[talk.factor].kind in (FREE, SUM, WHOLE):
            found.append(f"a talk about factor {talk.factor}, which is {rule.factors[talk.factor].kind}")
    return found


def simplest(layout: Layout, sizes: Sequence[int], mesh: Mesh) -> tuple[Layout, tuple[int, ...]]:
    """The canonical form of all layouts that give every member the same elements, with the sizes of its factors: rows split over
    x are the same as batch times sequence with the batch split over x. Two rules agree on a tensor if these are equal."""
    dims: list[tuple[str, ...]] = []
    shape: list[int] = []
    counts: list[int] = []
    left = list(zip(layout.dims, sizes, strict=True))
    for count in layout.factors or (1,) * len(layout.dims):
        first = len(dims)
        for axes, size in (left.pop(0) for _ in range(count)):
            axes = tuple(axis for axis in axes if mesh.axis_size(axis) > 1)
            full = (
                len(dims) > first and prod(map(mesh.axis_size, dims[-1])) == shape[-1]
            )  # each member has one of the major factor
            if len(dims) > first and (not axes or full or size == 1):
                dims[-1], shape[-1] = (*dims[-1], *axes), shape[-1] * size
            else:
                dims.append(axes)
                shape.append(size)
        counts.append(len(dims) - first)
    partial = tuple(axis for axis in layout.partial if mesh.axis_size(axis) > 1)
    return Layout(dims=tuple(dims), partial=partial, factors=tuple(counts)), tuple(shape)
