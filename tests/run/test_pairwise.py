"""The pairwise sample: every pair that can occur does, and the cases are cases of `make test-run`."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from tests.run.cases import FAMILIES, KINDS, SHAPES, every_case, sample
from tests.run.check import Verdict, misordered
from tests.run.models import MODELS, STAGED
from tests.run.pairwise import pairs_of, pairwise
from tests.run.results import Results, digest_of_sources


def test_every_pair_occurs() -> None:
    factors = [(0, 1, 2, 3), ("a", "b", "c"), (True, False), (5, 6, 7)]
    found = pairwise(factors)
    every = set().union(*(pairs_of(row) for row in product(*factors)))
    assert set().union(*map(pairs_of, found)) == every
    assert 12 <= len(found) <= 18  # at least the product of the two largest factors
    assert pairwise(factors) == found


def test_what_is_not_possible_does_not_occur() -> None:
    def possible(row: tuple[object, ...]) -> bool:
        return not (row[0] == 1 and row[1] == "b")

    found = pairwise([(0, 1), ("a", "b"), (True, False)], possible)
    assert all(map(possible, found))
    assert {(0, 0, 1, "b"), (0, 1, 1, "a"), (0, 1, 2, False)} <= set().union(*map(pairs_of, found))


def test_the_sample_is_of_all_cases_and_has_all_classes() -> None:
    cases, found = every_case(), sample()
    assert len({*cases}) == len(cases) > 1000
    assert {*found} <= {*cases}
    assert len({*found}) == len(found)
    assert all(any(case.model in members for case in found) for members in FAMILIES.values())
    assert all(any(case.mesh in members for case in found) for members in SHAPES.values())
    assert all(any(case.way in members for case in found) for members in KINDS.values())
    assert {case.model for case in cases} == {*MODELS, *STAGED}


def test_the_cases_have_all_pipelines_of_all_models_with_stages() -> None:
    found = {(case.model, case.stages, case.interleave) for case in every_case() if case.stages > 1}
    assert found == {*product(STAGED, (2, 4), (1, 2))}


def test_plans_that_are_ordered_otherwise_are_named() -> None:
    small, large, wrong = (Verdict(planned=(n,), peaks=(m,)) for n, m in ((100, 100), (120, 119), (90, 130)))
    assert not misordered({"a": small, "b": large}, 0.95)
    (text,) = misordered({"b": large, "c": wrong}, 0.95)
    assert text == "c takes 130 bytes and b 119: 90 and 120 were planned"
    assert not misordered({"a": small, "c": Verdict(planned=(97,), peaks=(105,))}, 0.95)


def test_results_are_found_again_for_the_same_sources(tmp_path: Path) -> None:
    path, verdict = tmp_path / "results.jsonl", Verdict(faults=("it hangs",), planned=(3, 3), peaks=(1, 2), seconds={"run": 1.0})
    Results(path, "one").add("a case", verdict)
    Results(path, "one").add("another", Verdict(no_plan="none"))
    with path.open("a") as file:
        file.write('{"case": "cut of')
    assert Results(path, "one").found == {"a case": verdict, "another": Verdict(no_plan="none")}
    assert not Results(path, "two").found
    assert digest_of_sources() == digest_of_sources()
