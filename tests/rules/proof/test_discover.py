"""Rules found by trying, against those that are known; and rules as text."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from scrimp.layout import Mesh
from scrimp.rules import WHOLE, Rule, check, choices, discover, rule_of
from scrimp.rules.core.call import bind
from scrimp.rules.core.text import written
from scrimp.rules.ops.registry import DISCOVERED
from tests.support.rule_examples import made, t

TWO = Mesh({"x": 2})


def line(text: str | None) -> tuple[str, str]:
    """As it would stand in the table."""
    assert text is not None
    ((target, rule),) = ast.literal_eval("{" + text + "}").items()
    return target, rule


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        (("aten.mm.default", t(4, 6), t(6, 10)), "a b, b c -> a c; sum b; linear 0; linear 1"),
        (("aten.mm.default", t(4, 4), t(4, 4)), "a b, b c -> a c; sum b; linear 0; linear 1"),  # sizes tell nothing
        (("aten.dot.default", t(12), t(12)), "a, a -> ; sum a; linear 0; linear 1"),
        (("aten.outer.default", t(4), t(6)), "a, b -> a b; linear 0; linear 1"),
        (("aten.glu.default", t(4, 6), 1), "a w0 -> a w1; whole w0 w1; given dim=1"),
        (("aten.kthvalue.default", t(4, 6), 2), "a w0 -> a, a; whole w0; given k=2; given dim=-1; given keepdim=False"),
        (("aten._cdist_forward.default", t(2, 4, 6), t(2, 3, 6), 2.0, None), "a b w0, a c w1 -> a b c; whole w0 w1; given p=2.0"),
        (("aten.native_layer_norm_backward.default", *[t(4, 6)] * 2, [6], *[t(4, 1)] * 2, t(6), t(6), [True] * 3), None),
    ],
)
def test_a_rule_is_found(call: tuple[Any, ...], wanted: str | None) -> None:
    target, text = line(discover(*made(*call)))
    assert target == call[0]
    if wanted is not None:
        assert text == wanted
    op, values = made(*call)
    bound = bind(op, values)
    assert bound is not None
    rule = written(text)(bound)
    assert rule is not None
    for factor in choices(rule, TWO, "x"):
        assert check(op, values, {factor: ("x",)}, TWO, rule=rule) == []


def split_dims(rule: Rule) -> set[tuple[int, int]]:
    """Which dims of which inputs may be split."""
    return {
        (index, at)
        for index, dims in enumerate(rule.inputs)
        for at, dim in enumerate(dims)
        if any(rule.factors[factor].kind != WHOLE for factor in dim)
    }


@pytest.mark.parametrize(
    "call",
    [
        ("aten.bmm.default", t(4, 6, 8), t(4, 8, 2)),
        ("aten.cumsum.default", t(4, 6), 1),
        ("aten.native_layer_norm.default", t(4, 6), [6], t(6), t(6), 1e-5),
        ("aten.sum.dim_IntList", t(4, 6), [1]),
        ("aten.transpose.int", t(4, 6, 8), 0, 2),
        ("aten.topk.default", t(4, 6), 2),
        ("aten.tanh_backward.default", t(4, 6), t(4, 6)),
    ],
    ids=lambda call: call[0],
)
def test_what_is_found_is_what_is_known(call: tuple[Any, ...]) -> None:
    op, values = made(*call)
    bound, known = bind(op, values), rule_of(op, values)
    assert bound is not None
    assert known is not None
    found = written(line(discover(op, values))[1])(bound)
    assert found is not None
    assert split_dims(found) == split_dims(known)
    assert set(found.linear) == set(known.linear)


def test_nothing_is_found_where_nothing_may_be_split() -> None:
    assert discover(*made("aten.flip.default", t(6), [0])) is None


def test_a_text_is_for_its_literals_and_its_dims() -> None:
    rule = written("a w0 -> a w1; whole w0 w1; given dim=1")
    for call, fits in ((("aten.glu.default", t(4, 6), 1), True), (("aten.glu.default", t(4, 6), 0), False)):
        bound = bind(*made(*call))
        assert bound is not None
        assert (rule(bound) is not None) is fits
    bound = bind(*made("aten.glu.default", t(4, 6, 8), 1))
    assert bound is not None
    assert rule(bound) is None
    bound = bind(*made("aten.mul.Tensor", t(4, 1), t(4, 6)))
    assert bound is not None
    assert written("a b, a b -> a b")(bound) is None


def test_the_table_is_what_discover_writes() -> None:
    examples = {"aten.dot.default": (t(12), t(12)), "aten.mv.default": (t(4, 6), t(6))}
    assert dict(line(discover(*made(target, *examples[target]))) for target in DISCOVERED) == {**DISCOVERED}
