"""Rules over whole models: every operator of their training has a rule, right in every way that one axis may split it."""

from __future__ import annotations

import pytest

from scrimp import zoo
from scrimp.layout import Mesh
from scrimp.rules import check, choices, rule_of

pytest.importorskip("scrimp.capture._capture")

from scrimp.capture import Graph, capture  # type: ignore[attr-defined,unused-ignore]
from tests import capture_models

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


@pytest.mark.parametrize("name", TINY)
def test_models_of_the_zoo(name: str) -> None:
    assert_right(capture(zoo.build(name), zoo.example_batch(name)))


@pytest.mark.full
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("family", capture_models.FAMILIES)
def test_models_of_transformers(family: str, dropout: bool) -> None:
    if dropout and family not in DROPOUT:
        pytest.skip("has none")
    model = capture_models.build(family, **(DROPOUT[family] if dropout else {})).train()
    assert_right(capture(model, (), capture_models.batch(family)))
