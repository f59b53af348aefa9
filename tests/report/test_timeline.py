"""Timelines on one axis: places, labels, thinning, and the difference between two."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scrimp.ledger import KINDS, Ledger, Recording
from scrimp.report import figures
from scrimp.report.run_view import difference
from scrimp.report.timeline import Curve, check_trace, highest, measured, predicted, thinned
from tests.report.runs import rehearsal

CHARGES = st.lists(
    st.tuples(st.sampled_from(["step", "op a", "op b", "free"]), st.sampled_from(KINDS[:4]), st.integers(1, 1000)), max_size=60
)


@given(CHARGES)
def test_a_recording_has_the_highest_total_of_every_operator(charges: list[tuple[str, str, int]]) -> None:
    """Against a plain list of all totals."""
    ledger = Ledger(tier="device")
    recording = ledger.recording = Recording(7)
    said: list[tuple[tuple[int, str], int]] = []
    step, operator = -1, ""
    for what, kind, size in charges:
        if what == "step":
            step, operator = step + 1, "fetch"
            recording.enter("forward", (0,))
        elif what == "free":
            ledger.free(kind, min(size, ledger.now[kind]))
        else:
            recording.operator = operator = what
            ledger.charge(kind, size)
            if step >= 0:
                said.append(((step, operator), sum(ledger.now.values())))
    runs: list[tuple[tuple[int, str], int]] = []
    for key, total in said:
        if runs and runs[-1][0] == key:
            runs[-1] = (key, max(runs[-1][1], total))
        else:
            runs.append((key, total))
    timeline = recording.timeline(KINDS)
    assert [
        ((point.schedule_step, point.operator), total) for point, total in zip(timeline.points, timeline.totals, strict=True)
    ] == runs
    assert len(timeline.stages) == step + 1
    trace = {"measured": timeline.to_data()}
    check_trace(trace, 1, "the trace")
    curve = measured(trace, ["blocks.0"])
    assert curve.totals == timeline.totals
    assert [*curve.places] == sorted(curve.places)
    assert [int(place) for place in curve.places] == [point.schedule_step for point in timeline.points]
    assert all(label.endswith(", forward of blocks.0") for label in curve.labels)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=200), st.integers(1, 50))
def test_thinning_keeps_the_peak(totals: list[int], most: int) -> None:
    curve = Curve(
        places=tuple(map(float, range(len(totals)))), labels=tuple(map(str, totals)), kinds={"parameters": tuple(totals)}
    )
    fewer = thinned(curve, most)
    assert len(fewer.places) == min(most, len(totals))
    assert max(fewer.totals) == max(totals)
    assert fewer.left_out == len(totals) - len(fewer.places)
    assert [*map(int, fewer.labels)] == fewer.totals
    assert [*fewer.places] == sorted(fewer.places)


def trace_of(totals: list[list[int]], told: list[int]) -> dict[str, Any]:
    stage = {"phase": "forward", "layers": [0], "resident": [0]}
    points = [[step, 0, 0, 0.0] for step, each in enumerate(totals) for _ in each]
    return {
        "measured": {
            "step": 3, "phases": ["forward"], "operators": ["aten.mm"], "points": points,
            "kinds": {"parameters": [total for each in totals for total in each]}, "schedule_steps": [stage] * len(totals),
        },
        "predicted": {"schedule_steps": [stage] * len(told), "kinds": {"parameters": told}},
    }  # fmt: skip


def test_the_difference_is_that_of_the_worst_schedule_step() -> None:
    trace = trace_of([[10, 100], [50], [200, 20]], [100, 60, 190])
    one, other = measured(trace, ["a"]), predicted(trace, None, ["a"])
    assert other is not None
    assert highest(one, 3) == [100, 50, 200]
    assert difference(one, other) == (0.2, 1)


def test_a_rehearsal_is_stretched_over_the_run() -> None:
    trace = trace_of([[10], [20], [30], [40]], [10, 20, 30, 40])
    found = predicted(trace, rehearsal(8), ["a"])
    assert found is not None
    assert found.places == tuple(k / 2 for k in range(8))
    assert found.labels[3] == "blocks.3 aten.mm"
    assert found.totals == [100 + 10 * k for k in range(8)]
    alone = predicted(None, rehearsal(8), [])
    assert alone is not None
    assert alone.places == tuple(map(float, range(8)))


def test_points_of_a_rehearsal_may_be_objects_with_schedule_steps() -> None:
    data = {**rehearsal(3), "points": [{"schedule_step": k, "operator": "aten.mm", "phase": "forward"} for k in (0, 0, 1)]}
    found = predicted(None, data, [])
    assert found is not None
    assert found.places == (0.0, 0.5, 1.0)
    assert found.labels[0] == "aten.mm, forward"


def test_a_chart_has_both_and_the_budget() -> None:
    trace = trace_of([[10, 100], [50]], [100, 60])
    chart = figures.memory(measured(trace, ["a"]), predicted(trace, None, ["a"]), 120)
    assert chart is not None
    assert [each["name"] for each in chart["series"]] == ["parameters", "predicted", "budget"]
    assert chart["start"] == 1
    assert chart["end"] == 2
    far = figures.memory(measured(trace, ["a"]), None, 10**9)
    assert far is not None
    assert [each["name"] for each in far["series"]] == ["parameters"]  # a budget far above would flatten everything
    assert figures.memory(None, None, 1) is None
