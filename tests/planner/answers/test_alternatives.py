"""Alternatives in a report of a plan: those of explain and of the Pareto front."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import scrimp
from scrimp import PlanError, zoo
from scrimp.planner import evaluate
from scrimp.planner.answers.alternatives import alternatives


@pytest.fixture(scope="module")
def plan() -> scrimp.Plan:
    return scrimp.plan(zoo.build("gpt-tiny"), zoo.example_on_meta("gpt-tiny", batch=8), "2xCPU", mesh="x=2", time_limit=2)


def test_prices_and_front(plan: scrimp.Plan) -> None:
    found = alternatives(plan, 4.0)
    front = [(point["peak_nbytes"], point["seconds"]) for point in found["front"]]
    assert front == sorted(front)
    assert [seconds for _, seconds in front] == sorted((seconds for _, seconds in front), reverse=True)
    assert front[0][0] <= plan.memory.peak_nbytes
    paths = [layers.path for layers in plan.layers if layers.path]
    assert [each["name"] for each in found["explained"]] == paths[: len(found["explained"])] != []
    # The judge that knows no solver: what is chosen has the plan's peak, to which prices are relative.
    source = plan.source
    assert evaluate(source.problem, source.solution.choice).peak_nbytes == plan.memory.peak_nbytes
    prices = [
        choice["next_best"]["peak_nbytes"]
        for each in found["explained"]
        for group in each["groups"]
        for choice in group["choices"]
        if choice["next_best"]
    ]
    assert prices


def test_a_plan_from_a_file_has_none(plan: scrimp.Plan, tmp_path: Path) -> None:
    loaded = scrimp.Plan.from_json(plan.to_json())
    assert alternatives(loaded, 1.0) == {}
    loaded.report(tmp_path / "plan.html")
    assert "in the process that made the plan" in (tmp_path / "plan.html").read_text()


def test_wrong_arguments(plan: scrimp.Plan, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="time_limit=0"):
        plan.report(tmp_path / "plan.html", time_limit=0)
    with pytest.raises(scrimp.RunError, match="cannot be written"):
        replace(plan, source=None).report(tmp_path / "no" / "plan.html")
    assert not [*tmp_path.iterdir()]
