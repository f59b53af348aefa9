"""Runs of layers as few groups: every number of layers can choose apart, and every operator has its own moment."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch

from scrimp import zoo
from scrimp.planner.api import captured
from scrimp.planner.cost.zero_levels import precision_of
from scrimp.planner.shard.layer_model import model_of
from scrimp.planner.shard.layer_runs import halves, parts_of
from scrimp.rules import rule_of


@pytest.mark.parametrize("length", [1, 2, 3, 7, 24, 96])
def test_any_number_of_layers_can_choose_apart(length: int) -> None:
    sizes = halves(length)
    assert sum(sizes) == length
    assert sizes[-1] == 1
    assert len(sizes) <= 2 + 2 * length.bit_length()
    sums = {sum(some) for count in range(len(sizes) + 1) for some in combinations(sizes, count)}
    assert sums == {*range(length + 1)}


def test_every_operator_has_a_moment_and_backwards_are_turned_round() -> None:
    precision = precision_of("bf16", "adamw")
    assert precision is not None
    with torch.device("meta"):
        model = zoo.build("gpt-tiny", layers=5)
    graph = captured(model, zoo.example_batch("gpt-tiny", 8, layers=5), precision)
    models = []
    for layer in graph.graphs:
        values = {value.name: value for value in layer.values}
        rules = {op.name: rule_of(op, values) for op in layer.ops}
        models.append(model_of(layer, rules))
    parts = parts_of(graph, models)
    assert [part.count for part in parts] == [1, 2, 1, 1, 1, 1]
    assert [part.first for part in parts] == [0, 1, 3, 4, 5, 6]
    running = [part.point(op) for part in parts for op in range(len(part.model.graph.ops))]
    running += [part.again(op) for part in parts for op in range(part.model.forward_ops)]
    points = [point + k for point in running for k in (-1, 0, 1)]  # resharding before, gradients after
    assert sorted(points) == [*range(len(points))]
    for before, after in pairwise(parts):
        assert before.forward < after.forward
        assert before.again(0) > after.span[1]
