"""Measured rates of operators: exact at measured sizes, between neighbours elsewhere, kept in a cluster's file."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp import Cluster
from scrimp.cluster import CLASSES, OperatorRate, Operators
from scrimp.errors import ScrimpError

sizes = st.lists(st.floats(1.0, 1e15), min_size=1, max_size=6, unique=True).map(sorted)


def rate_of(points: list[tuple[float, float]], operators: str = "matmul", dtype: str = "bfloat16") -> OperatorRate:
    return OperatorRate(operators=operators, dtype=dtype, points=tuple(points), error=0.0)


@given(sizes, st.data())
def test_a_measured_size_takes_what_was_measured_and_others_have_a_rate_between(found: list[float], data: st.DataObject) -> None:
    points = [(size, data.draw(st.floats(1e-6, 1e3))) for size in found]
    rate = rate_of(points)
    for size, seconds in points:
        assert rate.seconds(size) == pytest.approx(seconds, rel=1e-9)
    assert rate.seconds(found[0] / 2) == points[0][1]
    assert rate.seconds(3 * found[-1]) == pytest.approx(3 * points[-1][1])
    for (small, short), (large, long) in pairwise(points):
        middle = (small * large) ** 0.5
        slow, fast = sorted((small / short, large / long))
        assert slow * (1 - 1e-9) <= middle / rate.seconds(middle) <= fast * (1 + 1e-9)


MEASURED = Operators(
    device="some",
    rates=(
        rate_of([(1e6, 1e-5), (1e9, 1e-3)]),
        rate_of([(1e3, 2e-6), (1e9, 1e-2)], "pointwise"),
        rate_of([(1e3, 3e-6)], "pointwise", "float32"),
    ),
)


def test_a_product_of_few_flops_is_bound_by_memory() -> None:
    assert MEASURED.seconds("matmul", 1e9, 1e3, "bfloat16") == pytest.approx(1e-3)
    assert MEASURED.seconds("matmul", 1e6, 1e9, "bfloat16") == pytest.approx(1e-2)
    assert MEASURED.seconds("softmax", 0, 1e9, "bfloat16") is None
    assert MEASURED.seconds("matmul", 1e9, 1e3, "float32") is None


def test_a_cluster_predicts_by_what_was_measured_and_by_its_hardware_elsewhere() -> None:
    plain = Cluster.preset("8xA100-80")
    cluster = plain.with_operators(MEASURED)
    assert cluster.compute_seconds(1e9, 1e3, "bfloat16", "matmul") == pytest.approx(1e-3)
    assert cluster.compute_seconds(0, 1e9, "bfloat16", "softmax") == plain.compute_seconds(0, 1e9, "bfloat16")
    assert cluster.with_nodes(2).operators == MEASURED


def test_a_clusters_file_keeps_them() -> None:
    plain = Cluster.preset("8xA100-80")
    cluster = plain.with_operators(MEASURED)
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert '"version": 2' in plain.to_json()  # which older readers know


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"operators": "mamul"}, "the classes of operators are matmul, attention"),
        ({"points": ((2.0, 1.0), (1.0, 1.0))}, "sizes must rise"),
        ({"points": ()}, "sizes must rise"),
        ({"points": ((1.0, 0.0),)}, "must be above 0"),
        ({"error": float("nan")}, "it is 0 or more"),
    ],
)
def test_wrong_rates_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ScrimpError, match=words):
        OperatorRate(**{"operators": "matmul", "dtype": "float32", "points": ((1.0, 1.0),), "error": 0.0, **change})
    with pytest.raises(ScrimpError, match="operators cannot be read"):
        Operators.from_data({"device": "some", "rates": [{"operators": CLASSES[0]}]})
