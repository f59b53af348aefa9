"""Finds the least budget for a batch that did not fit: runs its step once more without a limit, reads the peaks, updates nothing.

This exceeds the budget for the duration of a step, but never what the machine has free. On the CPU the meter's peak is exactly
the number that it enforces. On CUDA the allocator needs somewhat more than the peak of allocated bytes, so a few larger budgets
are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from scrimp._arguments import OFFLOAD
from scrimp.chunks import DEVICE
from scrimp.engine.setup.budget import available_host_nbytes
from scrimp.engine.step.abandon import StepAgain, abandon
from scrimp.errors import FitError
from scrimp.ledger import format_least, format_nbytes

if TYPE_CHECKING:
    from scrimp.engine._training import Training
    from scrimp.engine.schedule.planned import Planned

SHARE = 0.8  # of the machine's free memory
GAPS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)  # tried on top of the allocated bytes, for fragmentation of the allocator


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peak bytes on the device, and peak bytes of activations offloaded to the host."""

    device_nbytes: int
    offloaded_nbytes: int = 0


Trial = Callable[[], Peaks]  # runs what did not fit and undoes it; raises FitError if it does not fit without a limit either


def least_of_step(engine: Training, reason: FitError, plan: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FitError:
    """The error, extended by the least budget that works if one is found."""
    trial = partial(_trial, engine, plan, args, kwargs)
    if engine.store.sparse and any(placement.tier == DEVICE for placement in engine.store.placements):
        return reason  # gradients are consumed on arrival there, so such a step cannot be undone
    offloads = OFFLOAD in engine.planning.ways and bool(engine.recompute.recomputable)
    found: dict[bool, Peaks | None] = {}
    for offloaded in (False, True) if offloads else (False,):
        engine.recompute.offloaded = offloaded
        found[offloaded] = _measured(engine, trial)
    kept, away = found[False], found.get(True)
    store, budget = engine.store, engine.budget.device_nbytes
    host = store.books.host
    at_rest = host.total_nbytes - host.now["temporaries"] - host.now["snapshot"] + store.spill.need_nbytes
    fits_host = (
        away is not None and store.host_room_nbytes is not None and at_rest + away.offloaded_nbytes <= store.host_room_nbytes
    )
    if away is not None and not fits_host and away.device_nbytes <= budget:
        least_host = _least_host(engine, away)
        words = f"The least that works for this batch is Memory(host='{format_least(least_host)}') with this device budget"
        if kept is not None:
            words += f", or Memory(device='{format_least(kept.device_nbytes)}') with this host budget"
        return FitError(f"{reason}. {words}", least_nbytes=least_host, tier="host")
    ways = [
        (peaks.device_nbytes, offloaded)
        for offloaded, peaks in found.items()
        if peaks is not None and (fits_host or not offloaded)
    ]
    if not ways:
        return _too_much(engine, reason)
    least, engine.recompute.offloaded = min(ways)
    more = ""
    if away is not None and not fits_host and away.device_nbytes < least:
        both = format_least(away.device_nbytes), format_least(_least_host(engine, away))
        more = f"; or Memory(device='{both[0]}', host='{both[1]}')"
    return _told(engine, reason, least, trial, "batch", more)


def _trial(engine: Training, plan: Planned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Peaks:
    """Peaks of a step up to its update; then everything is restored."""
    host, before = engine.ledger.host, engine.ledger.host.peak
    host.reset_peak()
    engine.rollback.begin(tracing=True)
    peaks: Peaks | FitError | StepAgain
    try:
        engine.run_micro_batches(plan, args, kwargs)
        peaks = Peaks(device_nbytes=engine.ledger.peak_nbytes, offloaded_nbytes=dict(host.peak.by_kind).get("activations", 0))
    except FitError as error:
        peaks = error.bare()
    except StepAgain as known:
        peaks = StepAgain(str(known), known.unfit)
    except BaseException:
        abandon(engine)
        engine.rollback.back()
        raise
    finally:
        host.peak = before
    abandon(engine)
    engine.rollback.back()
    if not isinstance(peaks, Peaks):
        raise peaks
    return peaks


def least_of_evaluation(engine: Training, reason: FitError, trial: Trial) -> FitError:
    found = _measured(engine, trial)
    return _too_much(engine, reason) if found is None else _told(engine, reason, found.device_nbytes, trial, "evaluation")


def _least_host(engine: Training, peaks: Peaks) -> int:
    """With the layers that are now placed on the device, since the peak was measured with them there."""
    on_device = sum(placement.tier == DEVICE for placement in engine.store.placements)
    return engine.fit.least_host_nbytes(peaks.offloaded_nbytes, on_device=on_device)


def _told(engine: Training, reason: FitError, least: int, trial: Trial, what: str, more: str = "") -> FitError:
    about = ""
    if engine.device.type == "cuda":
        about, least = "about ", _enough(engine, least, trial)
    if least <= engine.budget.device_nbytes:  # the budget should have sufficed, so something else is missing
        return reason
    words = f"The least that works for this {what} is {about}Memory(device='{format_least(least)}'){more}"
    return FitError(f"{reason}. {words}", least_nbytes=least, tier="device")


def _too_much(engine: Training, reason: FitError) -> FitError:
    words = f"What would be enough is more than this machine has left to try it with, {format_nbytes(_limit(engine))}"
    return FitError(f"{reason}. {words}", tier=reason.tier)


def _enough(engine: Training, peak_nbytes: int, trial: Trial) -> int:
    """On CUDA: the smallest of a few budgets under which the trial runs."""
    tries = [int(peak_nbytes * (1 + gaps)) for gaps in GAPS]
    for budget in (budget for budget in tries[:-1] if budget > engine.budget.device_nbytes):
        if _measured(engine, trial, budget) is not None:
            return budget
    return tries[-1]


def _measured(engine: Training, trial: Trial, limit_nbytes: int | None = None) -> Peaks | None:
    """The peaks of a trial, maximum over the ranks that run it together; None if it failed on one of them."""
    engine.store.wait()
    limit = _limit(engine) if limit_nbytes is None else limit_nbytes
    row, recompute = [0, 0, 1], engine.recompute
    with engine.meter.allowing(limit), _any_host(engine):
        while True:
            try:
                peaks = trial()
            except FitError:
                break
            except StepAgain as known:
                engine.planning.never_again(known.unfit, str(known))
                recompute.again &= recompute.recomputable
                continue
            update = engine.updating.stage_nbytes if any(placement.tier == DEVICE for placement in engine.store.placements) else 0
            row = [max(peaks.device_nbytes, engine.ledger.total_nbytes + update), peaks.offloaded_nbytes, 0]
            break
    device, offloaded, failed = engine.store.wire.every(torch.tensor(row)).amax(0).tolist()
    return None if failed else Peaks(device_nbytes=device, offloaded_nbytes=offloaded)


def _limit(engine: Training) -> int:
    """The largest device budget that the machine's free memory allows."""
    if engine.device.type == "cuda":
        free = torch.cuda.mem_get_info(engine.device)[0] + torch.cuda.memory_reserved(engine.device)
        return int(SHARE * free)
    return engine.ledger.total_nbytes + int(SHARE * available_host_nbytes()) // engine.fit.ranks_here


@contextmanager
def _any_host(engine: Training) -> Iterator[None]:
    """Inside, offloaded activations may use the machine's free memory."""
    before = engine.store.host_room_nbytes
    left = int(SHARE * available_host_nbytes()) // engine.fit.ranks_here
    engine.store.host_room_nbytes = engine.store.host_nbytes() + engine.store.spill.need_nbytes + left
    try:
        yield
    finally:
        engine.store.host_room_nbytes = before
