"""The checker: lowered plans pass, and no program that was changed anywhere does."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from scrimp import RunError
from scrimp.lower import Lowered, check, digest, lower
from scrimp.lower.steps import Accumulate, Call, Free, Move, Reduce, Step
from scrimp.planner import Placed
from tests.lower.test_interpret import planned
from tests.support.lowering.run import drawn

NAMES = ["gpt-tiny", "llama-tiny", "bert-tiny", "moe-tiny", "resnet-tiny"]


@pytest.mark.parametrize("name", NAMES)
def test_lowered_plans_are_right(name: str) -> None:
    least = planned(name, "x=2,y=2", "least")
    graph = least.source.graph
    check(lower(least, graph))
    for seed in range(4):
        found = lower(drawn(least, Random(seed)), graph)
        check(found)
        assert digest(found) != digest(lower(least, graph))
    assert digest(lower(least, graph)) == digest(lower(least, graph))


def changed(lowered: Lowered, layer: int, which: str, steps: tuple[Step, ...]) -> Lowered:
    one = lowered.layers[layer]
    new: Any = replace(one, **{which: replace(getattr(one, which), steps=steps)})
    return replace(lowered, layers=(new,))  # layers are checked one by one


def wrong(step: Step) -> Step | None:
    """A step that must not pass in place of the other."""
    match step:
        case Move():
            return replace(step, after=Placed(tuple(((size * 2, ()),) for ((size, _), *_) in step.after.dims)))
        case Reduce():
            return replace(step, before=step.before.complete())
        case Call(inputs=inputs) if len(set(inputs)) > 1:
            return replace(step, inputs=(*inputs[1:], inputs[0]))
        case Free(slots=slots):
            return Free(slots=(*slots, slots[0]))
    return None


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize("which", ["ahead", "behind"])
def test_a_program_that_was_changed_does_not_pass(name: str, which: str) -> None:
    least = planned(name, "x=2,y=2", "least")
    lowered = lower(drawn(least, Random(0)), least.source.graph)
    tried = caught = 0
    for layer in range(len(lowered.layers)):
        steps = getattr(lowered.layers[layer], which).steps
        for at, step in enumerate(steps):
            changes = [(*steps[:at], *steps[at + 1 :])]  # left out
            other = wrong(step)
            if other is not None:
                changes.append((*steps[:at], other, *steps[at + 1 :]))
            if isinstance(step, Accumulate):
                changes.append((*steps[: at + 1], step, *steps[at + 1 :]))  # twice
            for change in changes:
                tried += 1
                try:
                    check(changed(lowered, layer, which, change))
                except RunError:
                    caught += 1
    # Operands that may be exchanged: both sides of a sum or a product, in equal placements.
    assert caught > 0.9 * tried > 100
