"""Rules against torch: every operator whole against its parts, in every way that its rule allows."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from scrimp.capture.graph.graph import Op, Ref, Value
from scrimp.layout import Layout, Mesh
from scrimp.rules import (
    FREE,
    INSIDE,
    SUM,
    WHOLE,
    Factor,
    Rule,
    Split,
    check,
    choices,
    factored_shape,
    known_targets,
    layouts,
    localize,
    may_split,
    refine,
    rule_of,
)
from scrimp.rules import localized as localizing
from scrimp.rules.core.schema_private import Argument, all_targets, schema
from scrimp.rules.ops.pointwise import is_pointwise
from tests.support.rule_examples import BOOLS, EXAMPLES, T, ids, made, t

TWO, THREE, FOUR = Mesh({"x": 2}), Mesh({"x": 3}), Mesh({"x": 2, "y": 2})
# Kernels of CUDA alone; and names that torch or its parts offer only at times.
ELSEWHERE = {
    *(
        f"aten._scaled_dot_product_{kind}_attention{backward}.default"
        for kind in ("flash", "efficient", "cudnn")
        for backward in ("", "_backward")
    ),
    "aten._fused_rms_norm_backward.default",
}


def ways(rule: Rule) -> Iterator[tuple[Mesh, Split, dict[str, int]]]:
    """Every factor over 2 and over 3, every two of them over two axes, both axes on one, and sums with each."""
    linear, even = range(len(rule.linear)), list(choices(rule, TWO, "x"))
    yield TWO, {}, {}
    for mesh in (TWO, THREE):
        yield from ((mesh, {factor: ("x",)}, {}) for factor in choices(rule, mesh, "x"))
    yield from ((FOUR, {one: ("x",), other: ("y",)}, {}) for one, other in itertools.permutations(even, 2))
    yield from ((FOUR, {factor: ("y", "x")}, {}) for factor in even if may_split(rule.factors[factor], 4))
    yield from ((TWO, {}, {"x": index}) for index in linear)
    yield from ((FOUR, {factor: ("x",)}, {"y": index}) for factor in even for index in linear)


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{index}-{each[0]}" for index, each in enumerate(EXAMPLES)])
def test_an_operator_in_every_way_that_its_rule_allows(example: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    target, args, kwargs = example
    op, values = made(target, *args, **kwargs)
    rule = rule_of(op, values)
    assert rule is not None
    for mesh, split, sums in ways(rule):
        assert check(op, values, split, mesh, sums=sums) == []


@pytest.mark.parametrize("floats", ["float32", "bfloat16"])
def test_parts_have_the_dtypes_of_the_whole(floats: str) -> None:
    for target, args, kwargs in EXAMPLES:
        op, values = made(target, *args, **kwargs)
        rule = rule_of(op, values)
        assert rule is not None
        for factor in choices(rule, TWO, "x"):
            assert check(op, values, {factor: ("x",)}, TWO, floats=floats) == []


def test_every_known_operator_is_tried() -> None:
    tried = {target for target, _, _ in EXAMPLES}
    assert known_targets() - tried == ELSEWHERE
    assert all(schema(target) is not None for target in known_targets())


def test_operators_whose_dims_are_all_whole_are_few() -> None:
    """A rule that splits nothing proves nothing."""
    stuck = []
    for target, args, kwargs in EXAMPLES:
        op, values = made(target, *args, **kwargs)
        rule = rule_of(op, values)
        assert rule is not None
        if not any(may_split(factor, count) for factor in rule.factors for count in (2, 3)):
            stuck.append(target)
    assert set(stuck) <= {
        *("aten.argmax.default", "aten.argmin.default", "aten.max.default", "aten.min.default", "aten.prod.default"),
        *("aten.scalar_tensor.default", "aten.view.default"),  # of one number
        "aten.tril.default",
        "aten.histc.default",  # a count of all elements: parts are summed
    }


def test_what_draws_or_writes_is_not_pointwise() -> None:
    assert is_pointwise("aten.add.Tensor")
    assert not is_pointwise("aten.add_.Tensor")
    assert not is_pointwise("aten.native_dropout.default")
    assert not is_pointwise("aten.no_such_thing.default")
    assert rule_of(*made("aten.nonzero.default", t(4, 6))) is None


def test_private_names_of_torch() -> None:
    """Says when what is known of operators can no longer be read."""
    found = schema("aten.addmm.default")
    assert found is not None
    assert found.function is torch.ops.aten.addmm.default
    assert [each.name for each in found.arguments] == ["self", "mat1", "mat2", "beta", "alpha"]
    assert found.arguments[-1] == Argument(name="alpha", default=1, keyword=True, kind="number")
    assert (found.arguments[0].kind, found.arguments[0].needed) == ("Tensor", True)
    kinds = [each.kind for each in schema("aten.convolution.default").arguments]  # type: ignore[union-attr]
    assert kinds == ["Tensor", "Tensor", "Optional[Tensor]", *["List[int]"] * 3, "bool", "List[int]", "int"]
    assert [each.kind for each in schema("aten.cat.default").arguments] == ["List[Tensor]", "int"]  # type: ignore[union-attr]
    assert {"aten.mm.default", "aten.add.Tensor"} <= {*all_targets()}
    for target, marks in {
        "aten.add.Tensor": (True, False, False),
        "aten.add_.Tensor": (True, False, True),
        "aten.native_dropout.default": (False, True, False),
        "aten.mm.default": (False, False, False),
    }.items():
        known = schema(target)
        assert known is not None
        assert (known.pointwise, known.draws, known.writes) == marks, target
    assert schema("aten.no_such_thing.default") is None
    assert schema("no_such_library.x.default") is None


def wrong(rule: Rule, **factors: str) -> Rule:
    """The rule with other kinds of factors: f0="free"."""
    kinds = {int(name[1:]): kind for name, kind in factors.items()}
    changed = tuple(replace(each, kind=kinds.get(index, each.kind)) for index, each in enumerate(rule.factors))
    return replace(rule, factors=changed, talks=())


@pytest.mark.parametrize(
    ("call", "change", "split"),
    [
        (("aten.mm.default", t(4, 6), t(6, 12)), {"f1": FREE}, {1: ("x",)}),  # parts of a sum taken for the whole
        (("aten.mm.default", t(4, 6), t(6, 12)), {"f1": INSIDE}, {1: ("x",)}),
        (("aten.native_layer_norm.default", t(4, 8), [8], None, None, 1e-5), {"f1": FREE}, {1: ("x",)}),
        (("aten.embedding_dense_backward.default", t(4, 6), ids(4), 12, -1, False), {"f0": FREE}, {0: ("x",)}),
        (("aten.cumsum.default", t(4, 6), 1), {"f1": FREE, "f2": FREE}, {1: ("x",), 2: ("y",)}),
        (("aten.topk.default", t(4, 6), 2), {"f1": SUM}, {1: ("x",)}),
        (("aten.embedding.default", t(12, 6), ids(4)), {"f0": FREE}, {0: ("x",)}),
        (("aten.var_mean.correction", t(4, 6), [1]), {"f1": SUM}, {1: ("x",)}),
        (("aten.nll_loss_forward.default", t(12, 6), ids(12), None, 1, -100), {"f0": SUM}, {0: ("x",)}),  # counted twice
        (("aten.select.int", t(4, 6), 1, 2), {"f1": FREE}, {1: ("x",)}),
        (("aten.flip.default", t(4, 6), [0]), {"f0": FREE}, {0: ("x",)}),
        (("aten.scatter.src", t(4, 12), 1, ids(4, 6), t(4, 6)), {"f2": SUM}, {2: ("x",)}),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else None,
)  # fmt: skip
def test_a_wrong_kind_is_found(call: tuple[Any, ...], change: dict[str, str], split: Split) -> None:
    op, values = made(*call)
    rule = rule_of(op, values)
    assert rule is not None
    mesh = FOUR if any("y" in axes for axes in split.values()) else TWO
    assert check(op, values, split, mesh, rule=wrong(rule, **change)) != []


def test_a_wrong_tie_is_found() -> None:
    """A square matrix product with rows tied to columns has all the right sizes."""
    op, values = made("aten.mm.default", t(4, 4), t(4, 4))
    factors = (Factor(size=4), Factor(size=4, kind=SUM), Factor(size=4))
    right = Rule(factors=factors, inputs=(((0,), (1,)), ((1,), (2,))), outputs=(((0,), (2,)),))
    swapped = replace(right, outputs=(((2,), (0,)),))
    assert check(op, values, {0: ("x",)}, TWO, rule=right) == []
    assert check(op, values, {0: ("x",)}, TWO, rule=swapped) != []


def test_wrong_sums_are_found() -> None:
    for target, args in (
        ("aten.exp.default", (t(4, 6),)),
        ("aten.mul.Tensor", (t(4, 6), t(4, 6))),
        ("aten.add.Tensor", (t(4, 6), 1.0)),
    ):
        op, values = made(target, *args)
        rule = rule_of(op, values)
        assert rule is not None
        every = replace(rule, linear=(frozenset(range(len(op.inputs))),))
        assert check(op, values, {}, TWO, rule=every, sums={"x": 0}) != []


def test_what_stands_twice_is_not_linear() -> None:
    op, values = made("aten.mul.Tensor", T((4,), name="x"), T((4,), name="x"))
    assert rule_of(op, values).linear == ()  # type: ignore[union-attr]
    op, values = made("aten.add.Tensor", T((4,), name="x"), T((4,), name="x"))
    assert rule_of(op, values).linear == (frozenset({0, 1}),)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("table", "call", "split"),
    [
        ("_ADDENDS", ("aten.addmm.default", t(12), t(4, 6), t(6, 12)), {1: ("x",)}),  # the bias from all members
        ("_RUNS", ("aten.mean.dim", t(4, 6), [1]), {1: ("x",)}),  # a mean of means as if it were parts
        ("_RUNS", ("aten._log_softmax.default", t(4, 6), 1, False), {1: ("x",)}),
        ("_RUNS", ("aten.nll_loss_forward.default", t(12, 6), ids(12), None, 1, -100), {0: ("x",)}),
        ("_RUNS", ("aten._native_batch_norm_legit_functional.default", t(4, 6), *[t(6)] * 4, True, 0.1, 1e-5), {0: ("x",)}),
        ("_RUNS", ("aten.squeeze.default", t(2, 1, 6)), {0: ("x",)}),
        ("_RUNS", ("aten.arange.default", 12), {0: ("x",)}),
        ("_RUNS", ("aten.native_dropout.default", t(4, 12), 0.5, True), {}),  # replicas that draw for themselves
        ("_LITERALS", ("aten.expand.default", t(4, 1), [4, 6]), {1: ("x",)}),
        ("_LITERALS", ("aten.slice_backward.default", t(4, 8), [4, 24], 1, 8, 16, 1), {0: ("x",)}),
        ("_LITERALS", ("aten.convolution.default", t(4, 8, 5), t(12, 2, 3), None, [1], [1], [1], False, [0], 4), {1: ("x",)}),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else None,
)
def test_the_operator_itself_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch, table: str, call: tuple[Any, ...], split: Split
) -> None:
    """What members do beside calling the operator is needed, and missed if it is not done."""
    op, values = made(*call)
    assert check(op, values, split, TWO) == []
    kept = {target: each for target, each in getattr(localizing, table).items() if target != op.target}
    monkeypatch.setattr(localizing, table, kept)
    assert check(op, values, split, TWO) != []


def test_a_split_that_does_not_divide_is_refused() -> None:
    assert may_split(Factor(size=6), 3)
    assert may_split(Factor(size=6), 1)
    assert not may_split(Factor(size=6), 4)
    assert not may_split(Factor(size=6, kind=WHOLE), 3)
    assert may_split(Factor(size=6, kind=WHOLE), 1)
    assert not may_split(Factor(size=0), 2)
    op, values = made("aten.mm.default", t(4, 6), t(6, 12))
    (fault,) = check(op, values, {1: ("x", "y")}, FOUR)
    assert fault == "aten.mm.default: {1: ('x', 'y')} does not divide the factors [4, 6, 12] on x=2,y=2"


def test_layouts_of_a_choice() -> None:
    op, values = made("aten.addmm.default", t(12), t(4, 6), t(6, 12))
    rule = rule_of(op, values)
    assert rule is not None
    inputs, outputs = layouts(rule, {1: ("x",), 2: ("y",)})
    assert [str(each) for each in (*inputs, *outputs)] == ["[y]", "[-,x]", "[x,y]", "[-,y]+x"]
    inputs, outputs = layouts(rule, {2: ("y",)}, {"x": 0})
    assert [str(each) for each in (*inputs, *outputs)] == ["[y]+x", "[-,-]+x", "[-,y]", "[-,y]+x"]


def test_a_fused_projection_is_cut_with_each_part_split() -> None:
    op, values = made("aten.split.Tensor", t(4, 192), 64, -1)
    rule = rule_of(op, values)
    assert rule is not None
    inside = next(index for index, factor in enumerate(rule.factors) if factor.size == 64)
    inputs, outputs = layouts(rule, {inside: ("x",)})
    assert [str(each) for each in (*inputs, *outputs)] == ["[-,(-)(x)]"] + ["[-,x]"] * 3
    assert factored_shape(rule, rule.inputs[0]) == (4, 3, 64)


def test_a_factor_may_be_taken_for_a_product() -> None:
    """Rows as batch times sequence, columns as three of a head's width: a matrix product between views."""
    op, values = made("aten.addmm.default", t(24), t(12, 6), t(6, 24))
    rule = rule_of(op, values)
    assert rule is not None
    finer = refine(rule, 0, (4, 3))
    assert finer is not None
    finer = refine(finer, 2, (3, 8))
    assert finer is not None
    _, (out,) = layouts(finer, {3: ("x",), 4: ("y",)})
    assert out == Layout.parse("[(-)(x),(-)(y)]")
    assert check(op, values, {3: ("x",), 4: ("y",)}, Mesh({"x": 3, "y": 2}), rule=finer) == []
    assert check(op, values, {0: ("y",), 4: ("x",)}, FOUR, rule=finer) == []
    assert refine(rule, 0, (5, 3)) is None
    op, values = made("aten.embedding.default", t(12, 6), ids(4))
    assert refine(rule_of(op, values), 0, (4, 3)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("example", EXAMPLES, ids=[f"{index}-{each[0]}" for index, each in enumerate(EXAMPLES)])
def test_every_factor_that_may_be_a_product_is_right_as_one(example: tuple[str, tuple[Any, ...], dict[str, Any]]) -> None:
    """Also with its minor part split alone, where members hold no range."""
    target, args, kwargs = example
    op, values = made(target, *args, **kwargs)
    rule = rule_of(op, values)
    assert rule is not None
    for index, factor in enumerate(rule.factors):
        divisor = next((count for count in (2, 3) if factor.size % count == 0 and factor.size > count), None)
        if factor.kind == WHOLE or factor.ranged or divisor is None:
            continue
        finer = refine(rule, index, (factor.size // divisor, divisor))
        assert finer is not None
        assert check(op, values, {len(rule.factors): ("x",)}, Mesh({"x": divisor}), rule=finer) == []


def test_shards_draw_apart_and_replicas_alike() -> None:
    op, values = made("aten.native_dropout.default", t(4, 32), 0.5, True)
    rule = rule_of(op, values)
    assert rule is not None
    asked: list[tuple[tuple[str, int], ...]] = []

    def draw(coordinates: tuple[tuple[str, int], ...]) -> torch.Generator:
        asked.append(coordinates)
        return torch.Generator().manual_seed(hash(coordinates) % 1000)

    def never(tensor: torch.Tensor, how: str, axes: tuple[str, ...]) -> torch.Tensor:
        raise AssertionError("dropout does not talk")

    masks = [localize(op, rule, {0: ("x",)}, FOUR, rank, all_reduce=never, draw=draw)(torch.ones(2, 32))[1] for rank in range(4)]
    assert asked == [(("x", 0),), (("x", 0),), (("x", 1),), (("x", 1),)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_a_rule_for_an_unused_output_says_nothing() -> None:
    op, values = made("aten.native_layer_norm.default", t(4, 8), [8], t(8), t(8), 1e-5)
    rule = rule_of(replace(op, outputs=("out0", None, None)), values)
    assert rule is not None
    assert rule.outputs[1:] == (None, None)
    assert check(replace(op, outputs=("out0", None, None)), values, {0: ("x",)}, TWO) == []


def test_rules_load_without_torch() -> None:
    code = "from scrimp.rules import Rule, follow, layouts, refine, simplest; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cuda_attention_has_the_cpu_ones_factors() -> None:
    """Shapes by hand: no such kernel runs here. Batch and heads, and rows of the query where nothing pads or counts them."""
    shapes = dict.fromkeys(("q", "k", "v", "o"), (2, 4, 6, 8))

    def rule(kind: str, log_sum: tuple[int, ...], args: tuple[Any, ...], outputs: int, causal: bool) -> Rule:
        names = ("o", "l", *[None] * (outputs - 2))
        known = {**shapes, "l": log_sum}
        values = {
            name: Value(name=name, shape=shape, dtype="bfloat16", storage=name, kind="made") for name, shape in known.items()
        }
        refs = tuple(Ref(name=name) for name in "qkv")
        op = Op(
            name="o",
            target=f"aten._scaled_dot_product_{kind}_attention.default",
            args=(*refs, *args, causal),
            outputs=names,
            backward=False,
            cell=0,
            flops=0,
            where="",
        )
        found = rule_of(op, values)
        assert found is not None
        return found

    for causal, rows in ((True, WHOLE), (False, FREE)):
        flash = rule("flash", (2, 4, 6), (0.0,), 9, causal)
        cudnn = rule("cudnn", (2, 4, 6, 1), (None, True, 0.0), 9, causal)
        efficient = rule("efficient", (2, 4, 32), (None, True, 0.0), 4, causal)
        assert [each.factors[2].kind for each in (flash, cudnn, efficient)] == [rows, rows, WHOLE]
        for each in (flash, cudnn, efficient):
            assert [factor.kind for factor in each.factors[:2]] == [FREE, FREE]
            assert all(factor.kind == WHOLE for factor in each.factors[3:])


def test_masks_as_indices_and_tensors_that_are_written_into_have_no_rule() -> None:
    op, values = made("aten.index.Tensor", t(4, 6), [T((4,), BOOLS)])
    assert rule_of(op, values) is None
    op, values = made("aten.native_batch_norm.default", t(4, 6), t(6), t(6), t(6), t(6), True, 0.1, 1e-5)
    assert rule_of(op, values) is None
