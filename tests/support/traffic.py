"""What a step must fetch at least, by brute force: the cheapest path through all sets of layers that may be held.

Moments, sizes and rooms come from the engine's trace; nothing else is shared with what makes its schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from scrimp.chunks.schedule.eviction import ScheduleStep


def least_fetched(schedule_steps: Sequence[ScheduleStep], nbytes: Sequence[int]) -> int:
    """Of one step in a cycle that begins and ends with the same layers held."""
    layers = sorted({layer for schedule_step in schedule_steps for layer in schedule_step.needs})
    # A layer that its last moment ends cannot be held from one step to the next.
    last = {layer: schedule_step.ends for schedule_step in schedule_steps for layer in schedule_step.needs}
    stays = [layer for layer in layers if layer not in last[layer]]
    starts = [frozenset(held) for k in range(len(stays) + 1) for held in combinations(stays, k)]
    return min(_cheapest(schedule_steps, nbytes, start, frozenset(start)) for start in starts)


def _cheapest(schedule_steps: Sequence[ScheduleStep], nbytes: Sequence[int], start: frozenset[int], end: frozenset[int]) -> int:
    costs: dict[frozenset[int], int] = {start: 0}
    for schedule_step in schedule_steps:
        needs = frozenset(schedule_step.needs)
        after: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            fetched = sum(nbytes[layer] for layer in needs - held - frozenset(schedule_step.empty))
            others = sorted(held - needs)
            for k in range(len(others) + 1):
                for stay in combinations(others, k):
                    there = needs | frozenset(stay)
                    if sum(nbytes[layer] for layer in there) <= schedule_step.room_nbytes:
                        left = there - frozenset(schedule_step.ends)
                        after[left] = min(after.get(left, cost + fetched), cost + fetched)
        costs = after
    return min((cost for held, cost in costs.items() if held >= end), default=1 << 62)
