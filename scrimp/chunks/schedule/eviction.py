"""Which layers to hold at each moment, so that the fewest bytes come, under a room that changes over time.

A trace is the cyclic sequence of moments of a step: at each, some layers are needed together, and `room` bytes are left
for weights beside everything else. Between moments a layer that is held costs nothing; a layer that must come costs its
bytes up. A layer that is dropped costs nothing: its home has its content (it does, until its gradient lands). `_gaps` chooses
the layers that stay from one use to the next; every other layer leaves right after its use.

What room is left at a moment is lent: to layers on their way home, so that the next ones need not wait for the copy, and
to layers of the next moments, which then come while this one computes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from scrimp.chunks.schedule.gaps import Gap, most_saved
from scrimp.errors import FitError
from scrimp.ledger import format_nbytes

AHEAD = 2  # moments that a fetch may run ahead of its use
MOST_ROUNDS = 6


@dataclass(frozen=True, kw_only=True)
class ScheduleStep:
    """`needs`: layers that must be there, `empty` those of them of which only the place is needed; `ends`: layers that
    leave after it (their gradients have landed); `room_nbytes`: for weights."""

    needs: tuple[int, ...]
    room_nbytes: int
    ends: tuple[int, ...] = ()
    empty: tuple[int, ...] = ()
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """For moment i: `drops[i]` to let go of before it, `fetches[i]` what comes for it, `ahead[i]` what to start bringing
    during it; `lingers[i]`: layers that ended in the moment before and may stay while they are copied home. `keeps`:
    what stays from one step to the next."""

    drops: tuple[tuple[int, ...], ...]
    fetches: tuple[tuple[int, ...], ...]
    ahead: tuple[tuple[int, ...], ...]
    lingers: tuple[tuple[int, ...], ...]
    keeps: frozenset[int]
    fetched_nbytes: int


class _Uses:
    """When each layer is needed, and when next."""

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
    """Of a step that begins with the layers that it ends with."""
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
    drops = [(), *leave]  # after the last moment all go that are not in `keeps`
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
    """Between two uses of a layer, where the second wants its weights and the first does not end it."""
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
    """Fetches begin as early as there is room for them, but not while the same layer is still on its way out."""
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
    """What any schedule of this trace must fetch in a step, if layers could be held in parts: every byte is a page that
    is asked for together with its layer, and for pages of one size the farthest next use is the best to drop."""
    uses = _Uses(schedule_steps)
    held: dict[int, int] = {}
    rounds = [_fetched_in_parts(schedule_steps, nbytes, uses, held) for _ in range(MOST_ROUNDS)][1:]
    if len({*rounds}) == 1:
        return rounds[0]
    # They do not settle: another schedule could at most begin with everything.
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
