"""Which mesh axis of a plan a sparse exchange uses, and what is said if there is none."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from scrimp import RunError, Sparse, zoo
from scrimp.engine.lowered.sparse_axis import sparse_axis
from scrimp.ext.ranks import pool
from scrimp.lower import Lowered, lower
from scrimp.planner import captured_for
from tests.engine.lowered.test_planned_steps import ROWS
from tests.lower.test_ranks import planned


@cache
def lowered(mesh: str, way: str) -> Lowered:
    found = planned("gpt-tiny", {}, mesh, way)
    return lower(found, captured_for(found, zoo.build("gpt-tiny")))


@pytest.mark.parametrize(
    ("mesh", "way", "given", "axis"),
    [("x=4", "ddp", None, "x"), ("dp=2,tp=2", "tp", None, "dp"), ("x=2,y=2", "ddp", "y", "y"), ("x=1", "ddp", None, "x")],
)
def test_the_axis_that_replicates_weights_and_states(mesh: str, way: str, given: str | None, axis: str) -> None:
    assert sparse_axis(lowered(mesh, way), given) == axis


@pytest.mark.parametrize(
    ("mesh", "way", "given", "words"),
    [
        ("x=4", "zero-1", None, "trained parameters: along x ranks shard the optimizer states of embed.weight. Plan with"),
        ("x=4", "zero-3", None, "trained parameters: along x ranks shard the weight of embed.weight. Plan with"),
        ("dp=2,tp=2", "tp", "tp", "trained parameters: along tp ranks have tiles ["),
        ("dp=2,tp=2", "tp", "x", "Sparse(axis='x'): the plan's mesh is dp=2,tp=2"),
        ("x=2,y=2", "ddp", None, "is possible along x and y in this plan: choose one, such as Sparse(axis='x')"),
    ],
)
def test_an_axis_that_is_not_possible_is_refused(mesh: str, way: str, given: str | None, words: str) -> None:
    with pytest.raises(RunError) as caught:
        sparse_axis(lowered(mesh, way), given)
    assert words in str(caught.value)


def test_every_rank_is_refused() -> None:
    found = planned("gpt-tiny", {}, "x=2,y=2", "least").to_json()
    options: dict[str, Any] = {"exchange": Sparse(density=0.01)}
    for said in pool(4).run("tests.rank_jobs.planned_engine:refused", found, "gpt-tiny", ROWS, **options):
        assert said.startswith(
            "RunError: exchange=Sparse(...) needs a mesh axis along which the plan replicates weight and states"
        )
