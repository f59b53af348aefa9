"""Schedules prefetch and eviction: which layers are resident at each schedule step, fetching the fewest bytes in changing room.

A trace is the cyclic sequence of schedule steps of a training step. Each step needs some layers together, and leaves `room` bytes
for weights besides everything else. Keeping a layer resident between steps costs nothing. Fetching one costs its bytes. Evicting
one costs nothing, because its tier has its content (until its gradient arrives). `gaps.py` chooses the layers that stay from one
use to the next; every other layer is evicted right after its use.

The room left at a step is lent: to layers whose gradients are being copied down, so that the next layers need not wait for the
copy, and to layers of the next steps, which are then prefetched while this one computes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from scrimp.chunks.schedule.gaps import Gap, most_saved
from scrimp.errors import FitError
from scrimp.ledger import format_nbytes

AHEAD = 2  # schedule steps that a prefetch may run ahead of its use
MOST_ROUNDS = 6


@dataclass(frozen=True, kw_only=True)
class ScheduleStep:
    """`needs`: layers that must be resident; `empty`: those of them that need only their buffer; `ends`: layers that leave after
    it, because their gradients have arrived; `room_nbytes`: room for weights."""

    needs: tuple[int, ...]
    room_nbytes: int
    ends: tuple[int, ...] = ()
    empty: tuple[int, ...] = ()
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """For schedule step i: `drops[i]` are evicted before it, `fetches[i]` are fetched for it, `ahead[i]` are prefetched during
    it. `lingers[i]`: layers that ended in the step before and may stay while their gradients are copied down. `keeps`: layers
    that stay from one training step to the next."""

    drops: tuple[tuple[int, ...], ...]
    fetches: tuple[tuple[int, ...], ...]
    ahead: tuple[tuple[int, ...], ...]
    lingers: tuple[tuple[int, ...], ...]
    keeps: frozenset[int]
    fetched_nbytes: int


class _Uses:
    """The schedule steps that need each layer, and the next one from a given step."""

    def __init__(self, schedule_steps: Sequence[ScheduleStep]) -> None:
        self.total = len(schedule_steps)
        self.at: dict[int, list[int]] = {}
        for index, schedule_step in enumerate(schedule_steps):
            for layer in schedule_step.needs:
                self.at.setdefault(layer, []).append(index)

    def next(self, layer: int, now: int) -> int:
        uses = self.at[layer]
        k = bisect_right(uses, now)
        return uses[k] if k < len(uses) else uses[0] + self.total


def schedule(schedule_steps: Sequence[ScheduleStep], nbytes: Sequence[int]) -> Schedule:
    """The schedule of a training step that begins with the layers it ends with."""
    used = [sum(nbytes[layer] for layer in schedule_step.needs) for schedule_step in schedule_steps]
    for index, schedule_step in enumerate(schedule_steps):
        if used[index] > schedule_step.room_nbytes:
            raise FitError(
                f"{schedule_step.label or f'schedule step {index}'} needs {format_nbytes(used[index])} of weights, "
                f"but {format_nbytes(schedule_step.room_nbytes)} are left beside activations and buffers"
            )
    held = most_saved(
        _gaps(schedule_steps, nbytes),
        [schedule_step.room_nbytes - use for schedule_step, use in zip(schedule_steps, used, strict=True)],
    )
    comes = {(gap.layer, gap.before) for gap in held}
    stays = {(gap.layer, gap.after) for gap in held}
    for gap in held:
        for part in gap.schedule_steps:
            for index in range(part.start, part.stop):
                used[index] += gap.nbytes
    leave = [
        tuple(k for k in before.needs if k not in before.ends and k not in now.needs and (k, index) not in stays)
        for index, (before, now) in enumerate(pairwise(schedule_steps))
    ]
    drops = [(), *leave]  # after the last step all layers that are not in `keeps` are evicted
    fetches = [
        tuple(layer for layer in schedule_step.needs if layer not in schedule_step.empty and (layer, index) not in comes)
        for index, schedule_step in enumerate(schedule_steps)
    ]
    lingers = _lingering(schedule_steps, nbytes, used)
    return Schedule(
        drops=tuple(drops),
        fetches=tuple(fetches),
        ahead=_ahead(schedule_steps, nbytes, used, fetches, [{*a, *b} for a, b in zip(drops, lingers, strict=True)]),
        lingers=lingers,
        keeps=frozenset(gap.layer for gap in held if gap.before <= gap.after),
        fetched_nbytes=sum(nbytes[layer] for fetched in fetches for layer in fetched),
    )


def _gaps(schedule_steps: Sequence[ScheduleStep], nbytes: Sequence[int]) -> list[Gap]:
    """Intervals between two uses of a layer, where the second needs its weights and the first does not end it."""
    total, uses = len(schedule_steps), _Uses(schedule_steps)
    return [
        Gap(layer, nbytes[layer], now, then, total)
        for layer, times in uses.at.items()
        for now in times
        for then in (uses.next(layer, now) % total,)
        if layer not in schedule_steps[now].ends and layer not in schedule_steps[then].empty
    ]


def _lingering(schedule_steps: Sequence[ScheduleStep], nbytes: Sequence[int], used: list[int]) -> tuple[tuple[int, ...], ...]:
    lingers: list[tuple[int, ...]] = [()]
    for index in range(1, len(schedule_steps)):
        stay = []
        for layer in schedule_steps[index - 1].ends:
            if used[index] + nbytes[layer] <= schedule_steps[index].room_nbytes and layer not in schedule_steps[index].needs:
                used[index] += nbytes[layer]
                stay.append(layer)
        lingers.append(tuple(stay))
    return tuple(lingers)


def _ahead(
    schedule_steps: Sequence[ScheduleStep],
    nbytes: Sequence[int],
    used: list[int],
    fetches: list[tuple[int, ...]],
    leaving: Sequence[set[int]],
) -> tuple[tuple[int, ...], ...]:
    """Prefetches start as early as there is room, but not while the same layer is still being evicted."""
    ahead: list[list[int]] = [[] for _ in schedule_steps]
    for index in range(1, len(schedule_steps)):
        for layer in fetches[index]:
            start = index
            while (
                start > max(0, index - AHEAD)
                and used[start - 1] + nbytes[layer] <= schedule_steps[start - 1].room_nbytes
                and layer not in schedule_steps[start - 1].needs
                and layer not in schedule_steps[start - 1].ends
                and layer not in leaving[start]
                and layer not in leaving[start - 1]
            ):
                start -= 1
                used[start] += nbytes[layer]
            if start < index:
                ahead[start].append(layer)
    return tuple(tuple(layers) for layers in ahead)


def least_fetched_nbytes(schedule_steps: Sequence[ScheduleStep], nbytes: Sequence[int]) -> int:
    """A lower bound on the bytes that any schedule of this trace must fetch. It lets layers be resident in part: every byte is a
    page that is requested with its layer, and for pages of one size evicting the farthest next use is optimal."""
    uses = _Uses(schedule_steps)
    held: dict[int, int] = {}
    rounds = [_fetched_in_parts(schedule_steps, nbytes, uses, held) for _ in range(MOST_ROUNDS)][1:]
    if len({*rounds}) == 1:
        return rounds[0]
    # The rounds do not converge: another schedule could at best begin with every layer resident.
    return max(0, sum(rounds) - sum(nbytes)) // len(rounds)


def _fetched_in_parts(schedule_steps: Sequence[ScheduleStep], nbytes: Sequence[int], uses: _Uses, held: dict[int, int]) -> int:
    fetched = 0
    for index, schedule_step in enumerate(schedule_steps):
        for layer in schedule_step.needs:
            if layer not in schedule_step.empty:
                fetched += nbytes[layer] - held.get(layer, 0)
            held[layer] = nbytes[layer]
        over = sum(held.values()) - schedule_step.room_nbytes
        for layer in sorted({*held} - {*schedule_step.needs}, key=lambda layer: -uses.next(layer, index)):
            if over <= 0:
                break
            gone = min(over, held[layer])
            held[layer] -= gone
            over -= gone
        for layer in schedule_step.ends:
            held[layer] = 0
    return fetched
