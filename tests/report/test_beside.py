"""The plan's panel says what a device needs beside the plan, and from where the figures are."""

from __future__ import annotations

import json

import pytest

import scrimp
from scrimp import RunError, zoo
from scrimp.report.plan_view import plan_panel


def planned(cluster: str, reserve: str | None) -> dict[str, object]:
    model, batch = zoo.build("gpt-tiny", layers=1), zoo.example_batch("gpt-tiny", batch=8)
    made = scrimp.plan(model, batch, cluster, mesh="x=2", reserve=reserve, time_limit=1)
    data: dict[str, object] = json.loads(made.to_json())
    return data


def test_parts_are_listed_with_their_source() -> None:
    text = plan_panel(planned("2xA100-80", "auto"))
    assert "Beside the plan" in text
    assert "The budget of 80.0 GiB keeps these bytes free" in text
    for words in ("context", "workspace", "fragmentation", "NCCL", "estimated"):
        assert words in text


def test_without_a_reserve_the_kind_of_device_says_it() -> None:
    data = planned("2xA100-80", None)
    assert "budget does not count them" in plan_panel(data)
    assert "Beside the plan" not in plan_panel({**data, "cluster": "unreadable"})
    assert "Beside the plan" not in plan_panel(planned("2xCPU", None))
    with pytest.raises(RunError, match="the plan' is damaged"):
        plan_panel({**data, "reserve": {"parts": [{}]}})
