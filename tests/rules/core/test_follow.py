"""Operators that follow the layout of an operand."""

from __future__ import annotations

from math import prod
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scrimp.layout import Layout, Mesh
from scrimp.rules import Rule, check, factored_shape, follow, layouts, may_split, rule_of, simplest
from tests.support.rule_examples import EXAMPLES, ids, made, t

MESH = Mesh({"x": 2, "y": 2})


@given(
    st.sampled_from(
        [each for each in EXAMPLES if any(part in each[0] for part in ("mm", "view", "cat", "split", "sum", "norm", "add."))]
    ),
    st.data(),
)
def test_a_choice_is_found_again_by_the_layout_of_an_operand(
    example: tuple[str, tuple[Any, ...], dict[str, Any]], data: st.DataObject
) -> None:
    """And the choice that is found is right, and gives that layout."""
    op, values = made(example[0], *example[1], **example[2])
    rule = rule_of(op, values)
    assert rule is not None
    split = dict[int, tuple[str, ...]]()
    index = data.draw(st.integers(0, len(rule.inputs) - 1))
    held = {factor for dim in rule.inputs[index] for factor in dim}
    for axis in data.draw(st.permutations(MESH.names)):
        can = [at for at in held if may_split(rule.factors[at], 2 * prod(map(MESH.axis_size, split.get(at, ()))))]
        choice = data.draw(st.sampled_from([*can, None]))
        if choice is not None:
            split[choice] = (*split.get(choice, ()), axis)
    layout, sizes = layouts(rule, split)[0][index], factored_shape(rule, rule.inputs[index])
    found = follow(rule, rule.inputs[index], layout, sizes, MESH, index=index)
    assert found is not None
    finer, again, sums = found
    assert sums == {}
    given_layout = layouts(finer, again)[0][index]
    assert simplest(given_layout, factored_shape(finer, finer.inputs[index]), MESH) == simplest(layout, sizes, MESH)
    assert check(op, values, again, MESH, rule=finer) == []


@given(st.data())
def test_a_matrix_product_follows_any_layout(data: st.DataObject) -> None:
    """A matrix product can follow whatever divides: rows and columns cut anywhere, as another operator may have cut them."""
    op, values = made("aten.mm.default", t(12, 8), t(8, 12))
    rule = rule_of(op, values)
    assert rule is not None
    rows = data.draw(st.sampled_from(((12,), (3, 4), (4, 3), (2, 6), (2, 3, 2))))
    columns = data.draw(st.sampled_from(((8,), (2, 4), (4, 2), (2, 2, 2))))
    sizes, dims = (*rows, *columns), [()] * len(rows + columns)
    for axis in data.draw(st.permutations(MESH.names)):
        at = data.draw(st.sampled_from([*(at for at, size in enumerate(sizes) if size % (2 * 2 ** len(dims[at])) == 0), None]))
        if at is not None:
            dims[at] = (*dims[at], axis)
    layout = Layout(dims=tuple(dims), factors=(len(rows), len(columns)))
    found = follow(rule, rule.inputs[0], layout, sizes, MESH, index=0)
    assert found is not None
    finer, split, _ = found
    given_layout = layouts(finer, split)[0][0]
    assert simplest(given_layout, factored_shape(finer, finer.inputs[0]), MESH) == simplest(layout, sizes, MESH)
    assert check(op, values, split, MESH, rule=finer) == []


def test_what_cannot_be_followed_is_refused() -> None:
    op, values = made("aten.native_layer_norm.default", t(4, 6, 8), [8], t(8), t(8), 1e-5)
    rule = rule_of(op, values)
    assert rule is not None
    assert follow(rule, rule.inputs[0], Layout.parse("[-,-,x]"), (4, 6, 8), MESH, index=0) is None  # must be whole
    assert follow(rule, rule.inputs[0], Layout.parse("[-,-,-]+x"), (4, 6, 8), MESH, index=0) is None  # parts of a sum
    op, values = made("aten.embedding_dense_backward.default", t(4, 6), ids(4), 12, -1, False)
    rule = rule_of(op, values)
    assert rule is not None
    assert follow(rule, rule.outputs[0] or (), Layout.parse("[(-)(x),-]"), (3, 4, 6), MESH) is None  # must be a range
    assert follow(rule, rule.outputs[0] or (), Layout.parse("[x,-]"), (12, 6), MESH) is not None


def chained(layout: str, sizes: tuple[int, ...], calls: list[tuple[Any, ...]], mesh: Mesh) -> list[str]:
    """The layouts of a value that passes through operators: its place among the arguments stands first."""
    at, seen = Layout.parse(layout), [layout]
    for place, *call in calls:
        op, values = made(*call)
        rule: Rule | None = rule_of(op, values)
        assert rule is not None
        found = follow(rule, rule.inputs[place], at, sizes, mesh, index=place)
        assert found is not None, (call[0], str(at))
        finer, split, sums = found
        dims, out = finer.outputs[0], layouts(finer, split, sums)[1][0]
        assert dims is not None
        assert out is not None
        at, sizes = simplest(out, factored_shape(finer, dims), mesh)
        seen.append(str(at))
    return seen


def test_heads_split_from_the_fused_projection_to_the_output() -> None:
    """A block of 2 x 8 tokens, 4 heads of 4, as Megatron splits it: the weight's three times 16 columns inside, one sum at the
    end. The batch is over dp all along."""
    heads = t(2, 4, 8, 4)
    flash = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    seen = chained(
        "[dp,-]",
        (16, 16),
        [(1, "aten.addmm.default", t(48), t(16, 16), t(16, 48))],
        Mesh({"dp": 2, "tp": 2}),
    )
    assert seen == ["[dp,-]", "[dp,-]"]
    seen = chained(
        "[dp,(-)(tp)]",
        (16, 3, 16),
        [
            (0, "aten.view.default", t(16, 48), [2, 8, 48]),
            (0, "aten.split.Tensor", t(2, 8, 48), 16, 2),
            (0, "aten.view.default", t(2, 8, 16), [2, 8, 4, 4]),
            (0, "aten.transpose.int", t(2, 8, 4, 4), 1, 2),
            (0, flash, heads, heads, heads),
            (0, "aten.transpose.int", heads, 1, 2),
            (0, "aten.view.default", t(2, 8, 4, 4), [16, 16]),
            (1, "aten.addmm.default", t(16), t(16, 16), t(16, 16)),
            (0, "aten.view.default", t(16, 16), [2, 8, 16]),
        ],
        Mesh({"dp": 2, "tp": 2}),
    )
    assert seen == [
        "[dp,(-)(tp)]",
        "[dp,-,(-)(tp)]",
        "[dp,-,tp]",
        "[dp,-,tp,-]",
        "[dp,tp,-,-]",
        "[dp,tp,-,-]",
        "[dp,-,tp,-]",
        "[dp,tp]",
        "[dp,-]+tp",
        "[dp,-,-]+tp",
    ]


def test_a_split_sequence_passes_a_matrix_product() -> None:
    """Rows are batch times sequence, of which the second is split: no range of rows."""
    seen = chained(
        "[dp,tp,-]",
        (2, 8, 16),
        [
            (0, "aten.native_layer_norm.default", t(2, 8, 16), [16], t(16), t(16), 1e-5),
            (0, "aten.view.default", t(2, 8, 16), [16, 16]),
            (1, "aten.addmm.default", t(32), t(16, 16), t(16, 32)),
            (0, "aten.gelu.default", t(16, 32)),
            (0, "aten.view.default", t(16, 32), [2, 8, 32]),
        ],
        Mesh({"dp": 1, "tp": 2}),
    )
    assert seen == ["[dp,tp,-]", "[-,tp,-]", "[(-)(tp),-]", "[(-)(tp),-]", "[(-)(tp),-]", "[-,tp,-]"]
