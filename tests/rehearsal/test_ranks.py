"""A rehearsal on meta has the bytes of every real rank, at every point of a step, by kind."""

from __future__ import annotations

import pytest

from scrimp import Mesh
from tests.engine.lowered import test_planned_pipelines as pipelines
from tests.rehearsal.cases import differences, staged_differences
from tests.run.cases import Case, sample
from tests.run.plans import plan_of

SHORT = (  # the others, and the pairwise sample of `make test-run`, with `--full`
    Case("gpt-tiny", "x=2,y=2", "least", "adamw"),
    Case("llama-tiny", "x=4", "offload", "sgd"),
    Case("gpt-tiny", "x=2,y=2", "zero-1", "adamw"),
    Case("resnet-tiny", "x=2", "recompute", "adamw"),
)
FEWEST = 100  # ranks in all


def check(case: Case) -> None:
    if case.model.startswith("hf-"):
        pytest.importorskip("transformers")
    plan = plan_of(case.model, case.mesh, case.way, case.optimizer)
    found = differences(plan, case.model)
    assert len(found) == plan.mesh.size
    assert not [*filter(None, found)]


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_a_rehearsal_has_the_bytes_of_every_rank(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in sample() if case not in SHORT], ids=str)
def test_a_rehearsal_has_the_bytes_of_every_rank_of_the_sample(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    [*pipelines.QUICK[1:], *(pytest.param(each, marks=pytest.mark.full) for each in pipelines.FULL[::3])],
    ids=pipelines.called,
)
def test_a_rehearsal_has_the_bytes_of_every_rank_of_a_pipeline(case: pipelines.Case) -> None:
    family, _, _, _, dim, _ = case
    plan = pipelines.plan_of(case)
    found = staged_differences(plan, family, pipelines.named(family, dim), pipelines.ROWS, dim)
    assert len(found) == pipelines.ranks_of(plan)
    assert not [*filter(None, found)]


def test_the_cases_have_enough_ranks() -> None:
    assert sum(Mesh.parse(case.mesh).size for case in {*SHORT, *sample()}) >= FEWEST
