"""Every operator that has a rule, one by one: sizes, meshes of up to three axes and choices that hypothesis draws."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scrimp.capture.graph.graph import Op, Value
from scrimp.layout import Mesh
from scrimp.rules import Rule, Split, Sums, check, known_targets, may_split, rule_of
from scrimp.rules.core.call import bind
from scrimp.rules.ops import registry as knowing
from scrimp.rules.proof.random_inputs import sample
from tests.rules.ops.test_ops import ELSEWHERE
from tests.support.rule_examples import EXAMPLES, T, made

Example = tuple[str, tuple[Any, ...], dict[str, Any]]
EACH = max(4, settings().max_examples // 16)  # per operator: there are many
LARGEST = 20_000  # numbers in a tensor


def examples_of(target: str) -> list[Example]:
    return [each for each in EXAMPLES if each[0] == target]


def without_example() -> set[str]:
    return {target for target in known_targets() if not examples_of(target)} - ELSEWHERE


def resized(argument: Any, times: dict[int, int]) -> Any:
    """Tensors and lists of sizes with other sizes, the same for the same."""
    if isinstance(argument, T):
        return T(tuple(size * times.get(size, 1) for size in argument.shape), argument.dtype, argument.name)
    if isinstance(argument, (list, tuple)):
        return [each * times.get(each, 1) if type(each) is int else resized(each, times) for each in argument]
    return argument


def sizes_of(argument: Any) -> set[int]:
    if isinstance(argument, T):
        return {size for size in argument.shape if size > 1}
    return set().union(*map(sizes_of, argument)) if isinstance(argument, (list, tuple)) else set()


@st.composite
def calls(draw: st.DrawFn, target: str) -> tuple[Op, dict[str, Value]]:
    """An example as it is, or with other sizes if the operator takes them: some literals speak of sizes."""
    _, args, kwargs = draw(st.sampled_from(examples_of(target)))
    times = {size: draw(st.sampled_from((1, 1, 2, 3))) for size in sorted(sizes_of((*args, *kwargs.values())))}
    larger = [resized(each, times) for each in args], {name: resized(each, times) for name, each in kwargs.items()}
    if max(times.values(), default=1) > 1:
        try:
            op, values = made(target, *larger[0], **larger[1])
            sample(bind(op, values), seed=0, floats=torch.float64, device="cpu")  # type: ignore[arg-type]  # torch has it
            if rule_of(op, values) is not None and max(prod(value.shape) for value in values.values()) <= LARGEST:
                return op, values
        except (RuntimeError, ValueError, IndexError):
            pass
    return made(target, *args, **kwargs)


@st.composite
def choices(draw: st.DrawFn, rule: Rule) -> tuple[Mesh, Split, Sums]:
    """Each axis splits a factor, one that others may split already, has parts of a sum, or replicas. Some of 2, 3 and 4
    divide a size and others do not."""
    lengths = draw(st.lists(st.sampled_from((2, 3, 4)), min_size=1, max_size=3).filter(lambda each: prod(each) <= 16))
    mesh, split, sums = Mesh(dict(zip("xyz", lengths, strict=False))), dict[int, tuple[str, ...]](), dict[str, int]()
    for axis in draw(st.permutations(mesh.names)):
        over = {k: mesh.axis_size(axis) * prod(map(mesh.axis_size, split.get(k, ()))) for k in range(len(rule.factors))}
        can = [k for k, factor in enumerate(rule.factors) if may_split(factor, over[k])]
        choice = draw(st.sampled_from([*can, *can, *(-1 - index for index in range(len(rule.linear))), None]))
        if choice is not None and choice >= 0:
            split[choice] = (*split.get(choice, ()), axis)
        elif choice is not None:
            sums[axis] = -1 - choice
    return mesh, split, sums


@pytest.mark.parametrize("target", sorted(known_targets() - ELSEWHERE))
@given(data=st.data())
@settings(max_examples=EACH)
def test_any_choice_of_any_rule_is_right(target: str, data: st.DataObject) -> None:
    op, values = data.draw(calls(target))
    rule = rule_of(op, values)
    assert rule is not None
    mesh, split, sums = data.draw(choices(rule))
    assert check(op, values, split, mesh, sums=sums, seed=data.draw(st.integers(0, 3))) == []


def test_a_rule_without_an_example_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_example() == set()
    monkeypatch.setitem(knowing._RULES, "aten.glu.default", knowing.written("a w -> a v; whole w v"))
    assert without_example() == {"aten.glu.default"}
