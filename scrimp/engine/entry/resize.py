"""`engine.resize`: a live engine goes on with fewer or more ranks, without a file.

All ranks of the default process group call it, those that train and those that do not. Weights, master weights and optimizer
states go to their new ranks by bounded exchanges (`chunks/store/regroup.py`). Counters, settings, buffers and random state go to
ranks that join. A rank that leaves holds nothing afterwards, and waits for a later `resize`.

    begin ──> same engines? ──> settle (all layers on the host) ──> fit ──> regroup ──> carry ──> plan anew
                                                                            └─ from here on a failure ends the engine
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from scrimp.chunks import HOST, ChunkTable, Grouping, Rates, Regrouping, Wire, regrouped
from scrimp.engine.entry.rank_calls import Calls, begin_call
from scrimp.engine.schedule.engine_planning import planning_of
from scrimp.engine.schedule.metering_policy import MeteringPolicy
from scrimp.engine.setup.budget import Budget
from scrimp.engine.setup.initial_placement import Fit
from scrimp.engine.setup.process_groups import (
    Group,
    TrainingGroup,
    agreed,
    least_of_all,
    ranks_here,
    release,
    share_buffers,
    training_group,
)
from scrimp.errors import FitError, RunError, ScrimpError

if TYPE_CHECKING:
    from scrimp.engine._training import Training

INSTEAD = "save a checkpoint and load it with the other number of ranks"


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What this rank was given and measured, before it agreed with the others of its group."""

    budget: Budget
    rates: Rates
    chunk_numel: int


def resize(engine: Training, given: Group) -> None:
    _check(engine)
    _begin(engine)
    old, everyone = engine.group, engine.group.everyone
    with _together(everyone):
        _same_engines(engine)
    new = training_group(everyone, given)
    if new.members == old.members:
        release(new)
        return
    try:
        tables, budget, fit = _prepared(engine, old, new)
    except ScrimpError:
        release(new)
        raise
    groupings = [Grouping(table=table, members=group.members) for table, group in zip(tables, (old, new), strict=True)]
    change = Regrouping(everyone=everyone, old=groupings[0], new=groupings[1], wire=new.wire, host_room_nbytes=fit.room_nbytes)
    try:
        engine.store.regroup(change)
        _carry(engine, old, new)
        engine.group, engine.wire, engine.budget, engine.fit = new, new.wire, budget, fit
        release(old)
        _go_on(engine, was_outside=old.outside)
    except BaseException as error:
        engine.broken = f"engine.resize failed half-way ({type(error).__name__}: {error}); build a new Engine"
        engine.closed = True
        raise


def _prepared(engine: Training, old: TrainingGroup, new: TrainingGroup) -> tuple[list[ChunkTable], Budget, Fit]:
    """Tables of both groups, budget and fit of the new one. An error on one rank is raised on all, and nothing has changed."""
    with _together(old.everyone):
        if not old.outside:
            _settle(engine)
    tables = [_table(engine, group) for group in (old, new)]
    with _together(old.everyone):
        budget = least_of_all(new.wire, engine.alone.budget)
        fit = _fit(engine, new, tables[1], budget)
    return tables, budget, fit


def leave(engine: Training) -> None:
    """This rank does not train: end its threads, and lift its cap on the device."""
    engine.residents.abandon()
    engine.updating.end()
    engine.meter.close()


def _check(engine: Training) -> None:
    engine.check_open()
    if engine.plan is not None:
        raise RunError(f"engine.resize under a plan is not possible: it is for one number of ranks; {INSTEAD} and another plan")
    if engine.store.sparse:
        raise RunError(f"engine.resize with Sparse is not possible: every rank has residuals of its own; {INSTEAD}")
    if engine.budget.disk is not None:
        raise RunError(f"engine.resize with Memory(disk=...) is not possible: it shards what is in memory; {INSTEAD}")
    if engine.group.everyone.world == 1:
        raise RunError("engine.resize with one rank is not possible: start all ranks that may ever train, with torchrun")


def _begin(engine: Training) -> None:
    """The ranks that train agree first, so that one of them in another call is named; then all ranks."""
    if not engine.group.outside:
        begin_call(engine, "resize")
    if engine.meeting is not engine.calls:
        engine.meeting.begin("resize")


@contextmanager
def _together(everyone: Wire) -> Iterator[None]:
    """An error on one rank is an error on all ranks at once."""
    error: ScrimpError | None = None
    try:
        yield
    except ScrimpError as caught:
        error = caught
    failed = everyone.every(torch.tensor([int(error is not None)])).flatten().nonzero().flatten().tolist()
    if error is not None:
        raise error
    if failed:
        raise RunError(f"engine.resize: rank {failed[0]} failed, and no weight has moved; see the error there")


def _same_engines(engine: Training) -> None:
    store = engine.store
    slots = [(slot.name, slot.shape, slot.trainable, layer.wide) for layer in store.table.layers for slot in layer.slots]
    settings = store.optimizer
    items: dict[str, Any] = {
        "parameters": slots,
        "precision": engine.precision,
        "optimizer": (type(settings).__name__, settings.states, settings.state, len(engine.optimizer.param_groups)),
        "micro_batches": engine.micro_batches,
        "reduction": engine.reduction,
        "chunk_numel": engine.alone.chunk_numel,
        "clip_norm": engine.clip_norm,
        "skip_nonfinite": engine.skip_nonfinite,
        "activations": engine.planning.ways,
    }
    rows = engine.group.everyone.every(torch.tensor([_digest(repr(value).encode()) for value in items.values()]))
    differ = (rows != rows[0]).nonzero().tolist()
    if differ:
        rank, item = differ[0][0], [*items][differ[0][1]]
        raise RunError(
            f"engine.resize: rank {rank} and rank 0 have different {item}: build the Engine of every rank with the same arguments"
        )


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def _settle(engine: Training) -> None:
    """No save and no update runs, no layer is on the device, and all placements are on the host."""
    engine.check_usable()
    engine.saves.finish()
    engine.wait()
    engine.residents.abandon()
    engine.planning.placements_back(for_good=True)
    left = [layer.path for layer, at in zip(engine.store.table.layers, engine.store.placements, strict=True) if at.tier != HOST]
    if left:
        raise RunError(
            f"engine.resize: the host has no room for {len(left)} layers that are on the device, such as '{left[0]}', and ranks "
            f"exchange what is on the host; give a larger Memory(host=...), or {INSTEAD}"
        )
    engine.updating.streaming(False)


def _table(engine: Training, group: TrainingGroup) -> ChunkTable:
    return regrouped(engine.store.table, capacity=engine.alone.chunk_numel, world=len(group.members))


def _fit(engine: Training, new: TrainingGroup, table: ChunkTable, budget: Budget) -> Fit:
    fit = Fit(
        table,
        budget,
        precision=engine.precision,
        optimizer=engine.store.optimizer,
        micro_batches=engine.micro_batches,
        world=len(new.members),
        ranks_here=ranks_here(new.wire),
    )
    if not new.outside and any(tier != HOST for tier in fit.places()):
        raise FitError(
            f"engine.resize({[*new.members]}): the host has no room for all layers of so few ranks, and ranks exchange what "
            f"is on the host; keep more ranks, give a larger Memory(host=...), or {INSTEAD}",
            least_nbytes=None,
            tier="host",
        )
    return fit


def _carry(engine: Training, old: TrainingGroup, new: TrainingGroup) -> None:
    """Everything but model data, from the first rank of the old group to ranks that join. Buffers are those of the first rank, as
    in every step."""
    first, joins = old.members[0], old.outside and not new.outside
    text = json.dumps(
        {
            "steps": engine.steps,
            "skipped": engine.skipped,
            "norm": engine.norm,
            "counts": engine.counts,
            "loss_scale": (engine.loss_scale.value, engine.loss_scale.good),
            "groups": engine.optimizer.saved(),
        }
    )
    told = json.loads(_from(old.everyone, first, text.encode()))
    engine.rules.forget()
    if joins:
        engine.steps, engine.skipped, engine.norm, engine.counts = (told[key] for key in ("steps", "skipped", "norm", "counts"))
        engine.loss_scale.value, engine.loss_scale.good = told["loss_scale"]
        engine.optimizer.load(told["groups"])
    share_buffers(old.everyone, engine.model, first)
    _carry_random(engine, old, joins)


def _from(everyone: Wire, first: int, data: bytes) -> bytes:
    """The bytes of one rank, on every rank."""
    numel = int(everyone.from_first(torch.tensor([len(data)]), first))
    mine = data if everyone.rank == first else bytes(numel)
    return bytes(everyone.from_first(torch.frombuffer(bytearray(mine), dtype=torch.uint8), first).tolist())


def _carry_random(engine: Training, old: TrainingGroup, joins: bool) -> None:
    """Ranks that stay keep their random state. Where all of them have the same, a rank that joins gets it; else one of its own,
    which follows from the first rank's state and its own number."""
    states = [torch.get_rng_state()]
    if engine.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(engine.device))
    rows = old.everyone.every(torch.tensor([_digest(bytes(state.numpy())) for state in states]))
    first, theirs = old.members[0], rows[[*old.members]]
    if not bool((theirs == theirs[0]).all()):
        if joins:
            torch.manual_seed(_digest(repr((theirs[0].tolist(), old.everyone.rank)).encode()))
        return
    states = [old.everyone.from_first(state, first) for state in states]
    if joins:
        torch.set_rng_state(states[0])
        if engine.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], engine.device)


def _go_on(engine: Training, *, was_outside: bool) -> None:
    """In the new group: calls are compared within it, and batches are planned anew."""
    group = engine.group
    engine.calls = engine.meeting if group.wire is group.everyone else Calls(group.wire, engine.interrupts.check)
    engine.metering = MeteringPolicy(engine.meter, engine.ledger.device)
    if group.outside:
        leave(engine)
        return
    if was_outside:
        engine.updating.renew()
    engine.meter.budget_nbytes = engine.budget.device_nbytes
    engine.meter.begin()
    engine.planning = planning_of(engine, engine.planning.ways, agreed(group.wire, engine.alone.rates))
