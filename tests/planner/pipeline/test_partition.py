"""Cuts of layers into stages: the same as trying them all, and with fewer looks at stages."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from scrimp.planner.pipeline.partition import Kind, Search


def every_cut(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]


class Row:
    """Layers of few classes; a stage's value is what its layers have, and the most that one of them takes beside."""

    def __init__(self, seed: int, layers: int, stages: int) -> None:
        rng = random.Random(seed)
        self.layers, self.stages = layers, stages
        self.classes = [0, *(rng.choice([1, 1, 1, 2]) for _ in range(layers - 2)), 3]
        self.fixed = [rng.uniform(1, 9) for _ in range(4)]
        self.saved = [rng.uniform(0, 5) for _ in range(4)]
        self.compare = [rng.uniform(0, 20) for _ in range(4)]
        self.limit = rng.choice([float("inf"), 40.0])
        self.looks = 0

    def flights(self, s: int) -> int:
        return self.stages - s

    def kind(self, s: int, i: int, j: int) -> Kind:
        return Kind(setting=(i == 0, j == self.layers), layers="".join(map(chr, self.classes[i:j])), weight=self.flights(s))

    def floor(self, s: int, i: int, j: int) -> float:
        return sum(self.fixed[c] + self.flights(s) * self.saved[c] for c in self.classes[i:j])

    def value(self, s: int, i: int, j: int) -> float:
        found = self.floor(s, i, j) + max(self.compare[c] for c in self.classes[i:j])
        return found if found <= self.limit else float("inf")

    def look(self, s: int, i: int, j: int) -> tuple[float, float]:
        self.looks += 1
        return (self.value(s, i, j),) * 2


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("by_time", [False, True])
def test_the_best_of_all_cuts_is_found(seed: int, by_time: bool) -> None:
    rng = random.Random(seed)
    layers, stages = rng.randint(3, 10), rng.randint(1, 3)
    row = Row(seed, layers, stages)

    def score(largest: float, total: float) -> float:
        return 3 * largest + total

    def scored(cut: tuple[int, ...]) -> float:
        values = [row.value(s, cut[s], cut[s + 1]) for s in range(stages)]
        return score(max(values), sum(values)) if by_time else max(values)

    least = min(map(scored, every_cut(layers, stages)))
    search = Search(
        layers=layers, stages=stages, kind=row.kind, floor=row.floor, exact=row.look, score=score if by_time else None
    )  # fmt: skip
    cut, value, bound = search.run()
    if least == float("inf"):
        assert cut is None
        return
    assert cut is not None
    assert value == pytest.approx(least)
    assert scored(cut) == pytest.approx(least)
    assert bound == pytest.approx(least)


def test_few_stages_are_looked_at() -> None:
    row = Row(1, 34, 4)
    row.classes, row.limit = [0, *[1] * 32, 3], float("inf")
    search = Search(layers=34, stages=4, kind=row.kind, floor=row.floor, exact=row.look)
    cut, value, _ = search.run()
    assert cut is not None
    assert value == pytest.approx(min(max(row.value(s, c[s], c[s + 1]) for s in range(4)) for c in every_cut(34, 4)))
    assert row.looks <= 16
