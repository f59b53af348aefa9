"""Rules over whole models: every operator of their training has a rule, right in every way that one axis may split it."""

from __future__ import annotations

import pytest

from scrimp import zoo
from scrimp.capture.graph.graph import Graph, LayerGraph, Value
from scrimp.layout import Layout, Mesh
from scrimp.rules import Rule, Split, Sums, check, choices, factored_shape, follow, layouts, rule_of, simplest

pytest.importorskip("scrimp.capture._capture")

from scrimp.capture import capture  # type: ignore[attr-defined,unused-ignore]
from tests.support import capture_models

TWO = Mesh({"x": 2})
TINY = [f"{family}-tiny" for family in ("gpt", "llama", "bert", "vit", "resnet", "vgg", "moe")]
DROPOUT = {
    "gpt2": {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
}


def assert_right(graph: Graph) -> None:
    seen = set[str]()
    for layer in graph.graphs:
        values = {value.name: value for value in layer.values}
        for op in layer.ops:
            form = repr((op.target, op.args, op.kwargs, [(values[name].shape, values[name].dtype) for name in op.inputs]))
            for name in op.inputs:
                form = form.replace(f"'{name}'", "")
            if form in seen:
                continue
            seen.add(form)
            rule = rule_of(op, values)
            assert rule is not None, op
            for factor in choices(rule, TWO, "x"):
                assert check(op, values, {factor: ("x",)}, TWO) == [], op
            for index in range(len(rule.linear)):
                assert check(op, values, {}, TWO, sums={"x": index}) == [], op
    assert len(seen) > 30


def whole(value: Value) -> tuple[Layout, tuple[int, ...]]:
    return Layout(dims=((),) * len(value.shape)), value.shape


def moves_of_a_split_batch(graph: LayerGraph) -> list[str]:
    """Every operator follows one of its operands, the batch being split and parameters whole; which of them need others moved?"""
    values = {value.name: value for value in graph.values}
    placed, moved = {name: whole(value) for name, value in values.items()}, []
    for name, value in values.items():
        if value.kind in ("border", "tangent") and value.shape:
            placed[name] = simplest(Layout(dims=(("x",), *((),) * (len(value.shape) - 1))), value.shape, TWO)
    for op in graph.ops:
        rule = rule_of(op, values)
        assert rule is not None
        ways: list[tuple[Rule, Split, Sums]] = [(rule, {}, {})]
        for index, name in enumerate(op.inputs):
            layout, sizes = placed[name]
            found = follow(rule, rule.inputs[index], layout, sizes, TWO, index=index)
            ways += [found] if found is not None and placed[name] != whole(values[name]) else []
        costs = []
        for finer, split, sums in ways:
            inputs = layouts(finer, split, sums)[0]
            wanted = [simplest(each, factored_shape(finer, dims), TWO) for each, dims in zip(inputs, finer.inputs, strict=True)]
            # A part of what all have is free.
            costs.append(
                sum(
                    placed[name] != each and (placed[name] != whole(values[name]) or bool(each[0].partial))
                    for name, each in zip(op.inputs, wanted, strict=True)
                )
            )
        finer, split, sums = ways[costs.index(min(costs))]
        moved += [op.target] if min(costs) else []
        for output, layout, dims in zip(op.outputs, layouts(finer, split, sums)[1], finer.outputs, strict=True):
            if output is not None and layout is not None and dims is not None:
                placed[output] = simplest(layout, factored_shape(finer, dims), TWO)
    return moved


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "vit-tiny", "resnet-tiny", "vgg-tiny-bn"])
def test_a_split_batch_passes_through_forward_and_backward_without_a_move(name: str) -> None:
    """Data parallelism falls out of the rules, batch norm over all of the batch included."""
    graph = capture(zoo.build(name), zoo.example_batch(name))
    assert [moves_of_a_split_batch(layer) for layer in graph.graphs] == [[]] * len(graph.graphs)


@pytest.mark.parametrize("name", TINY)
def test_models_of_the_zoo(name: str) -> None:
    assert_right(capture(zoo.build(name), zoo.example_batch(name)))


def test_attention_that_makes_its_scores() -> None:
    settings = {"dropout": 0.1, "attention": "eager", "seq": 16}
    assert_right(capture(zoo.build("gpt-tiny", **settings), zoo.example_batch("gpt-tiny", **settings)))


@pytest.mark.full
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("family", capture_models.FAMILIES)
def test_models_of_transformers(family: str, dropout: bool) -> None:
    if dropout and family not in DROPOUT:
        pytest.skip("has none")
    model = capture_models.build(family, **(DROPOUT[family] if dropout else {})).train()
    assert_right(capture(model, (), capture_models.batch(family)))
