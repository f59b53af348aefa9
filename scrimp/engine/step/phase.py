"""The phase of an engine, and how a step decides which layers are resident.

    idle ──> forward ──> backward ──> forward (the next micro-batch) ──> ... ──> idle
    idle ──> evaluate ──> idle

A mode belongs to a step: `forward` and `backward` have one, `idle` and `evaluate` have none.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATE = "evaluate"


class Mode(StrEnum):
    TRACE = "trace"  # hold only the layers that run, and record the schedule steps
    FOLLOW = "follow"  # prefetch and evict as a schedule says
    STATIC = "static"  # all layers stay on the device, and the step is not metered: there are no schedule steps


NEXT = {
    Phase.IDLE: {Phase.IDLE, Phase.FORWARD, Phase.EVALUATE},
    Phase.FORWARD: {Phase.BACKWARD, Phase.IDLE},
    Phase.BACKWARD: {Phase.FORWARD, Phase.IDLE},
    Phase.EVALUATE: {Phase.IDLE},
}
STEPPING = {Phase.FORWARD, Phase.BACKWARD}


def check_transition(now: Phase, then: Phase) -> None:
    if then not in NEXT[now]:
        raise AssertionError(f"the engine cannot go from phase '{now}' to '{then}', only to {', '.join(sorted(NEXT[now]))}")


def check_mode(phase: Phase, mode: Mode | None) -> None:
    if mode is not None and phase not in STEPPING:
        raise AssertionError(f"phase '{phase}' has no mode, but the mode is '{mode}'")
