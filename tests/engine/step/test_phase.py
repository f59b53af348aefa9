"""Phases of an engine: the legal transitions, and what they are during a step and an evaluation."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from scrimp import zoo
from scrimp.engine import Engine
from scrimp.engine.step.phase import NEXT, Mode, Phase, check_mode, check_transition


@pytest.mark.parametrize(("now", "then"), [*product(Phase, Phase)])
def test_only_legal_transitions(now: Phase, then: Phase) -> None:
    if then in NEXT[now]:
        check_transition(now, then)
    else:
        with pytest.raises(AssertionError, match=f"from phase '{now}' to '{then}'"):
            check_transition(now, then)


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.EVALUATE])
@pytest.mark.parametrize("mode", Mode)
def test_a_mode_belongs_to_a_step(phase: Phase, mode: Mode) -> None:
    check_mode(phase, None)
    check_mode(Phase.FORWARD, mode)
    with pytest.raises(AssertionError, match=f"phase '{phase}' has no mode, but the mode is '{mode}'"):
        check_mode(phase, mode)


def test_a_step_traces_then_follows_and_an_evaluation_has_no_mode() -> None:
    model = zoo.build("gpt-tiny")
    batch = zoo.example_batch("gpt-tiny", batch=2, step=0)
    seen: list[tuple[Phase, Mode | None]] = []
    with Engine(model, memory="1MiB", device="cpu", precision="fp32") as engine:
        residents = engine._run.residents

        def look(*_: object) -> None:
            seen.append((residents.phase, residents.mode))

        model.blocks[0].register_forward_hook(look)
        model.blocks[0].register_full_backward_hook(look)
        for _ in range(3):
            engine.step(*batch)
        engine.evaluate(*batch)
        assert (residents.phase, residents.mode) == (Phase.IDLE, None)
    assert seen[0] == (Phase.FORWARD, Mode.TRACE)
    assert (Phase.BACKWARD, Mode.TRACE) in seen
    assert (Phase.FORWARD, Mode.FOLLOW) in seen
    assert seen[-1] == (Phase.EVALUATE, None)


def test_a_step_that_fails_ends_idle() -> None:
    model = zoo.build("gpt-tiny")
    with Engine(model, memory="1GiB", device="cpu") as engine:
        with pytest.raises(IndexError):
            engine.step(*(torch.full_like(tensor, 10**6) for tensor in zoo.example_batch("gpt-tiny", batch=2, step=0)))
        assert engine._run.residents.phase is Phase.IDLE
