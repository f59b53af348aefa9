"""Plans of another model, batch, precision or torch are refused with the first difference."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from scrimp import Plan, PlanWarning, RunError, plan, zoo
from scrimp.capture import Graph
from scrimp.lower import lower
from scrimp.planner import captured, precision_of


def graph_of(rows: int = 8, precision: str = "fp32", name: str = "gpt-tiny", **settings: Any) -> Graph:
    numbers = precision_of(precision, "adamw")
    assert numbers is not None
    return captured(zoo.build(name, **settings), zoo.example_batch(name, rows, **settings), numbers)


@cache
def planned() -> Plan:
    return plan(zoo.build("gpt-tiny"), zoo.example_batch("gpt-tiny", 8), "2xCPU", mesh="x=2", precision="fp32", time_limit=1)


def test_a_plan_from_a_file_runs_with_the_model_captured_again() -> None:
    lower(Plan.from_json(planned().to_json()), graph_of())


def test_the_first_difference_is_named() -> None:
    cases = {
        "'tokens' of the batch is int64[8, 32] in the plan and int64[4, 32] here": graph_of(4),
        "the plan has 4 layers, the model 5": graph_of(layers=3),
        "operators over dims": graph_of(dim=64),
        "layer the model: operator 0 is aten.embedding.default in the plan and aten.zeros_like.default": graph_of(
            name="bert-tiny"
        ),
    }
    for words, graph in cases.items():
        with pytest.raises(RunError, match="plan this model") as error:
            lower(planned(), graph)
        assert words in str(error.value)
    with pytest.raises(RunError, match=r"operator 4 is aten\.view\.default in the plan and aten\._to_copy"):
        lower(planned(), graph_of(precision="bf16"))


def test_another_torch_is_a_warning_if_the_graph_is_the_same() -> None:
    other = replace(planned(), model=replace(planned().model, torch="2.0.0"))
    with pytest.warns(PlanWarning, match=r"made with torch 2\.0\.0"):
        lower(other, graph_of())
    strange = replace(other, model=replace(other.model, graph="0" * 32))
    with pytest.raises(RunError, match=r"torch 2\.0\.0 captured the planned one"):
        lower(strange, graph_of())


def test_plans_for_comparison_are_refused() -> None:
    with pytest.raises(RunError, match="for comparison with Megatron-LM"):
        lower(replace(planned(), precision="megatron-bf16"), graph_of())
