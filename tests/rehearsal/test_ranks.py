"""A rehearsal on meta has the bytes of every real rank, at every point of a step, by kind."""

from __future__ import annotations

import pytest

from scrimp import Mesh
from tests.engine.lowered.test_planned_pipelines import FULL, QUICK, ranks_of
from tests.rehearsal.cases import differences
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
    plan = plan_of(case.model, case.mesh, case.way, case.optimizer, case.stages, case.interleave)
    found = differences(plan, case.model)
    assert len(found) == ranks_of(plan)
    assert not [*filter(None, found)]


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_a_rehearsal_has_the_bytes_of_every_rank(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in sample() if case not in SHORT], ids=str)
def test_a_rehearsal_has_the_bytes_of_every_rank_of_the_sample(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [QUICK[1], *(pytest.param(each, marks=pytest.mark.full) for each in FULL)], ids=str)
def test_a_rehearsal_has_the_bytes_of_every_rank_of_a_pipeline(case: Case) -> None:
    check(case)


def test_the_cases_have_enough_ranks() -> None:
    assert sum(Mesh.parse(case.mesh).size for case in {*SHORT, *sample()}) >= FEWEST
