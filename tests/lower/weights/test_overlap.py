"""Which moves run beside operators: never before what they wait for, and never above the peak, counted once more."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from scrimp.errors import RunError
from scrimp.lower import buckets_of, later_axes, lower, overlap_of
from scrimp.lower.footprint import Hold, check_holds, footprint
from scrimp.lower.steps import Accumulate, Call, Gather
from scrimp.lower.weights.buckets import PassBuckets
from tests.lower.test_ranks import planned

CASES = [
    ("gpt-tiny", "x=4", "zero-3"),
    ("gpt-tiny", "x=2,y=2", "least"),
    ("llama-tiny", "x=4", "ddp"),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("bert-tiny", "x=2,y=2", "zero-3-full"), ("moe-tiny", "x=4", "zero-3-full"), ("resnet-tiny", "x=4", "zero-3"),
        ("vit-tiny", "x=2,y=2", "recompute"), ("gpt-tiny", "x=2,y=2", "zero-2"),
    )),
]  # fmt: skip


class Line:
    """All steps one behind the other, and one place behind each pass; counted apart from what decides."""

    def __init__(self, lowered: Any) -> None:
        self.lowered, self.steps, self.most = lowered, [], []
        self.gathers: dict[Any, list[int]] = {}
        self.sums: dict[Any, list[int]] = {}
        self.end: dict[Any, int] = {}
        for key, each in footprint(lowered).items():
            layer = lowered.layers[key[0]]
            program = layer.behind if key[1] else layer.ahead
            at = len(self.steps)
            self.gathers[key] = [at + k for k, step in enumerate(program.steps) if isinstance(step, Gather)]
            self.sums[key] = [at + k for k, step in enumerate(program.steps) if isinstance(step, Accumulate)]
            self.steps += [(layer, step) for step in program.steps] + [(layer, None)]
            self.most += [*each.most, each.after]
            self.end[key] = len(self.steps) - 1
        self.peak = max(max(each.held) for each in footprint(lowered).values())

    def tile(self, place: int) -> int:
        """Bytes of the weight that a step gathers, or of the gradient that it gives, in fp32."""
        layer, step = self.steps[place]
        return 4 * self.lowered.rest[layer.names[step.weight]].flat_shape(self.lowered.mesh)[1]

    def members(self, place: int) -> int:
        layer, step = self.steps[place]
        return prod(map(self.lowered.mesh.axis_size, self.lowered.rest[layer.names[step.weight]].weight))

    def place(self, hook: Any) -> int:
        key, kind, number = hook
        return self.end[key] if kind == "end" else (self.gathers if kind == "gather" else self.sums)[key][number]

    def buckets(self, key: Any, each: PassBuckets) -> None:
        """Adds what waits in buckets, by `PassBuckets`: weights that came early, and gradients that are not reduced yet."""
        for group in each.bring:
            for other in group[1:]:
                for place in range(self.gathers[key][group[0]], self.gathers[key][other]):
                    self.most[place] += self.tile(self.gathers[key][other])
        for group in each.sum:
            for other in group[:-1]:
                for place in range(self.sums[key][other] + 1, self.sums[key][group[-1]]):
                    self.most[place] += self.tile(self.sums[key][other])


@pytest.mark.parametrize(("name", "mesh", "way"), CASES)
def test_moves_on_their_way_stay_below_the_peak_and_overlap_operators(name: str, mesh: str, way: str) -> None:
    plan = planned(name, {}, mesh, way)
    lowered = lower(plan, plan.source.graph)
    later = later_axes((lowered,), accumulated=False)
    buckets = buckets_of(lowered, later)
    found = overlap_of(lowered, buckets, later)
    line, spans = Line(lowered), []
    for key, each in buckets.passes.items():
        line.buckets(key, each)
    for hook, started in found.starts.items():
        for key, number in started:
            first, due, each = line.place(hook), line.gathers[key][number], buckets.passes[key]
            arriving = sum(line.tile(line.gathers[key][other]) for other in each.bring[number])
            alone = len(each.bring[number]) == 1 and number not in each.spread
            assert all(line.members(line.gathers[key][other]) > 1 for other in each.bring[number])
            spans.append((first, due, arriving if alone else 2 * arriving))
    for hook, until in found.ends.items():
        first, last, group = line.place(hook) + 1, line.place(until) + 1, buckets.passes[hook[0]].sum[hook[2]]
        spans.append((first, last, 2 * sum(line.tile(line.sums[hook[0]][other]) for other in group)))
        assert not any(first <= line.place(other) < last - 1 for other in found.ends if other != hook)  # one at a time
    held = set()
    for first, stop, nbytes in spans:
        assert any(isinstance(step, Call) for _, step in line.steps[first:stop])
        for place in range(first, stop):
            line.most[place] += nbytes
            held.add(place)
    assert all(line.most[place] <= line.peak for place in held)
    assert spans or way == "recompute"


def test_a_gather_starts_when_the_bucket_before_it_has_arrived() -> None:
    """In the forward of ZeRO-3, where there is room: each layer's first bucket starts in the layer before."""
    plan = planned("gpt-tiny", {}, "x=4", "zero-3")
    lowered = lower(plan, plan.source.graph)
    found = overlap_of(lowered, buckets_of(lowered, {}), {})
    ahead = {key: hook[0] for hook, started in found.starts.items() for key, _ in started}
    for layer in range(1, len(lowered.layers)):
        assert ahead[layer, False] == (layer - 1, False)


def test_too_much_on_its_way_is_an_error() -> None:
    plan = planned("gpt-tiny", {}, "x=4", "zero-3")
    lowered = lower(plan, plan.source.graph)
    buckets = buckets_of(lowered, {})
    found = overlap_of(lowered, buckets, {})
    check_holds(lowered, buckets.left, found.holds)
    more = [Hold(start=each.start, stop=each.stop, nbytes=1 << 24) for each in found.holds]
    with pytest.raises(RunError, match="this is a fault of scrimp"):
        check_holds(lowered, buckets.left, more)
