"""Checks a rule in every split that it allows, on small meshes: for known rules and for discovered ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import torch

from scrimp.capture import Op, Value
from scrimp.layout import Mesh
from scrimp.rules.core.call import bind
from scrimp.rules.core.layouts import Split, Sums, choices, may_split
from scrimp.rules.core.rule import Rule
from scrimp.rules.proof.check import check
from scrimp.rules.proof.random_inputs import sample

TWO, THREE = Mesh({"x": 2}), Mesh({"x": 3})
FOUR, SIX, EIGHT = Mesh({"x": 2, "y": 2}), Mesh({"x": 2, "y": 3}), Mesh({"x": 2, "y": 2, "z": 2})


@dataclass(frozen=True, kw_only=True)
class Proof:
    """`ways`: number of splits tried, with each seed; `faults`: the errors; `meshes`: those over which something was split."""

    ways: int
    seeds: int
    meshes: tuple[str, ...]
    faults: tuple[str, ...]


def ways(rule: Rule) -> Iterator[tuple[Mesh, Split, Sums]]:
    """Nothing split; every factor over 2 and over 3; every two over two axes, both axes on one, three over three axes; and
    partial sums with each."""
    linear, even = range(len(rule.linear)), list(choices(rule, TWO, "x"))
    yield TWO, {}, {}
    for mesh in (TWO, THREE):
        yield from ((mesh, {factor: ("x",)}, {}) for factor in choices(rule, mesh, "x"))
    yield from ((FOUR, {one: ("x",), other: ("y",)}, {}) for one, other in permutations(even, 2))
    for mesh, axes, members in ((FOUR, ("y", "x"), 4), (SIX, ("x", "y"), 6)):
        yield from ((mesh, {k: axes}, {}) for k, factor in enumerate(rule.factors) if may_split(factor, members))
    yield from ((EIGHT, dict(zip(three, (("z",), ("x",), ("y",)), strict=True)), {}) for three in combinations(even, 3))
    yield from ((TWO, {}, {"x": index}) for index in linear)
    yield from ((FOUR, {factor: ("x",)}, {"y": index}) for factor in even for index in linear)


def prove(op: Op, values: Mapping[str, Value], rule: Rule, seeds: Sequence[int] = (0, 1)) -> Proof:
    faults: list[str] = []
    meshes: dict[str, None] = {}
    count = 0
    for mesh, split, sums in ways(rule):
        count += 1
        if split or sums:
            meshes[str(mesh)] = None
        for seed in seeds:
            faults += check(op, values, split, mesh, rule=rule, sums=sums, seed=seed)
    return Proof(ways=count, seeds=len(seeds), meshes=tuple(meshes), faults=tuple(faults))


def refuses(op: Op, values: Mapping[str, Value]) -> str | None:
    """Why an operator cannot be checked: it rejects random inputs, or is not deterministic."""
    call = bind(op, values)
    assert call is not None, op.target
    try:
        inputs = sample(call, seed=0, floats=torch.float64, device="cpu")
        made = [call.run(call.filled([tensor.clone() for tensor in inputs])) for _ in range(2)]
        same = all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(*made, strict=True))
    except Exception as error:  # operators raise many kinds of errors
        return str(error).partition("\n")[0] or type(error).__name__
    return None if same else "it draws random numbers, so its results differ each time"
