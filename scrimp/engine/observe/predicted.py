"""The memory that an engine's schedule predicts for each schedule step of a training step.

At a schedule step the device holds what is at rest there (placements on the device, buffers), the weights of layers that the
schedule keeps resident, and what the tracing step had besides weights at most. Gradients overwrite weights, so they need no
term of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from scrimp.chunks import DEVICE, Schedule, ScheduleStep, Store
from scrimp.engine.schedule.planned import Planned
from scrimp.ledger import Timeline

if TYPE_CHECKING:
    from scrimp.engine._training import Training

METERED, PACKETS = "all but model data", "packets of the exchange"
AT_REST = ("gradients", "optimizer", "residual", "buffers", "padding")


def predicted_step(engine: Training, recorded: Timeline) -> dict[str, Any] | None:
    """For the schedule that the recorded step followed, by kind; None if it followed none. `METERED` is everything that the meter
    counts: activations, temporaries, the workspace of kernels, and the batch."""
    plan, store, now = engine.planning.current, engine.store, engine.ledger.device.now
    if plan is None or plan.choice is None or plan.expected != tuple(stage.layers for stage in recorded.stages):
        return None
    resting = now["parameters"] - sum(store.nbytes(k) for k, there in enumerate(store.resident) if there)
    residents = [*residents_of(store, plan.choice.schedule, plan.trace)]
    kinds = {kind: [now[kind]] * len(residents) for kind in AT_REST if now[kind]}
    return {
        "schedule_steps": [
            {"phase": stage.phase, "layers": [*stage.layers], "resident": sorted(resident)}
            for stage, resident in zip(recorded.stages, residents, strict=True)
        ],
        "kinds": {
            "parameters": [resting + sum(map(store.nbytes, resident)) for resident in residents],
            **kinds,
            **_besides(engine, plan),
        },
    }


def _besides(engine: Training, plan: Planned) -> dict[str, list[int]]:
    """What is there besides model data: as traced. The tracing step of a sparse exchange had its packets on the host. So those of
    layers on the device are reserved, until an earlier step that followed the schedule has shown what they take."""
    store, seen = engine.store, plan.seen
    packets = engine.planning.sending_nbytes if any(each.tier == DEVICE for each in store.placements) else 0
    if packets and seen is not None and seen.choice is plan.choice and seen.alike > 1:
        return {METERED: [schedule_step.room_nbytes for schedule_step in seen.schedule_steps]}
    reserved = {PACKETS: [packets] * len(plan.trace)} if packets else {}
    return {METERED: [schedule_step.room_nbytes for schedule_step in plan.trace], **reserved}


def residents_of(store: Store, schedule: Schedule, trace: tuple[ScheduleStep, ...]) -> Iterator[set[int]]:
    """The layers that are on the device in each schedule step, as `Residents` follows a schedule."""
    resident = {layer for layer in range(len(store.flats)) if store.anchored(layer)} | {*schedule.keeps}
    gone: set[int] = set()
    for at, schedule_step in enumerate(trace):
        resident -= gone - {*schedule.lingers[at]}
        gone &= {*schedule.lingers[at]}
        resident -= {*schedule.drops[at]} - {layer for layer in schedule.drops[at] if store.anchored(layer)}
        resident |= {*schedule_step.needs}
        gone -= {*schedule_step.needs}
        if store.wire.world == 1:
            resident |= {*schedule.ahead[at]}
            gone -= {*schedule.ahead[at]}
        yield {*resident}
        gone |= {layer for layer in schedule_step.ends if not store.anchored(layer)}
