"""Chooses placements and kept activations from a trace: least predicted seconds within the budget.

Variables:
    A   layers placed on the device: no traffic, updated there; each holds its weights, masters and states permanently
    T   layers whose weights stay on the device, and whose masters and states are streamed through it for the update
    K   layers whose activations are kept from forward to backward; the others are recomputed
    the schedule of the rest (`eviction.py`): how often each layer's weights are fetched

Constraint, at every schedule step: A + resident weights + kept activations + what the trace measured besides weights <= budget.

A grows from the first layers executed (their gradients come last and their weights are needed first), K from the last
ones (their activations live the shortest). That leaves two numbers, searched on a grid that is refined around its best
point; every point is a full simulation of the schedule. For each of them the size of T is a linear program in one unknown
(each further layer takes from the host's memory what it gives to link and device), so all its sizes are compared. The layers of T
are spread evenly, so that the host and the link finish their shares at the same time all along the model.

Seconds of a step: `step_cost.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scrimp.chunks.schedule.eviction import Schedule, ScheduleStep, schedule
from scrimp.chunks.schedule.step_cost import LayerCost, Rates, Work, seconds
from scrimp.errors import FitError

GRID = 5


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A placement of all layers with its schedule and predicted cost."""

    device: frozenset[int]
    streamed: frozenset[int]
    kept: frozenset[int]
    schedule: Schedule
    schedule_steps: tuple[ScheduleStep, ...]  # with the room that this choice leaves
    up_nbytes: int
    down_nbytes: int
    seconds: float  # predicted


def choose_placement(
    schedule_steps: Sequence[ScheduleStep],
    layers: Sequence[LayerCost],
    rates: Rates,
    *,
    update_room_nbytes: int,
    stages_nbytes: int = 0,
    world: int = 1,
    compute: tuple[float, float] | None = None,
    checked: bool = True,
    streamed: frozenset[int] = frozenset(),
) -> Choice:
    """`room_nbytes` of the schedule steps is what the trace left free, with every recomputable layer recomputed and no layer
    placed on the device. `update_room_nbytes`: room for placements during an update. `stages_nbytes`: buffers needed if any layer
    is streamed. `compute`: seconds of forward and backward, if they are known and everything else may overlap with them.
    `streamed`: layers that are streamed in any case."""
    order = [*dict.fromkeys(layer for schedule_step in schedule_steps for layer in schedule_step.needs)]
    fixed = [k for k, layer in enumerate(layers) if layer.fixed]
    movable = [*fixed, *(k for k in order if layers[k].movable and not layers[k].fixed)]
    recomputable = [k for k in reversed(order) if layers[k].recomputable]
    point = _Point(
        schedule_steps, layers, rates, _spans(schedule_steps), update_room_nbytes, stages_nbytes, world, compute, checked
    )
    tried: dict[tuple[int, int], Choice | None] = {}

    def attempt(placements: int, keeps: int) -> Choice | None:
        if (placements, keeps) not in tried:
            device, kept = frozenset(movable[:placements]), frozenset(recomputable[:keeps])
            found = point.evaluate(device, kept, streamed)
            if found is not None and compute is not None:
                streaming = point.streaming(found, [k for k in order if layers[k].passable and k not in device])
                other = point.evaluate(device, kept, streaming) if streaming else None
                found = other if other is not None and other.seconds < found.seconds else found
            tried[placements, keeps] = found
        return tried[placements, keeps]

    best = _refine(attempt, len(fixed), len(movable), len(recomputable))
    if best is None:
        point.evaluate(frozenset(fixed), frozenset(), streamed, strict=True)
        raise FitError("no choice of placements and kept activations fits")
    return best


def _refine(attempt: Callable[[int, int], Choice | None], least: int, placements: int, keeps: int) -> Choice | None:
    """Searches the number of layers on the device, from `least` on, and of layers kept, from 0 on."""
    best: tuple[float, int, int] | None = None
    low, high = (least, 0), (placements, keeps)
    while True:
        for a in _grid(low[0], high[0]):
            for k in _grid(low[1], high[1]):
                choice = attempt(a, k)
                # Of equal seconds the one that holds fewer.
                if choice is not None and (best is None or (choice.seconds, a, k) < best):
                    best = (choice.seconds, a, k)
        if best is None and max(high[0] - low[0], high[1] - low[1]) > 1:
            high = ((low[0] + high[0]) // 2, (low[1] + high[1]) // 2)
            continue
        if best is None:
            return None
        steps = [max(1, (high[i] - low[i]) // (GRID - 1)) for i in range(2)]
        if max(steps) == 1 and all(high[i] - low[i] < 2 * GRID for i in range(2)):
            return attempt(best[1], best[2])
        at = best[1:]
        new_low = tuple(max((least, 0)[i], at[i] - steps[i]) for i in range(2))
        new_high = tuple(min((placements, keeps)[i], at[i] + steps[i]) for i in range(2))
        low, high = (new_low[0], new_low[1]), (new_high[0], new_high[1])


def _grid(low: int, high: int) -> list[int]:
    if high - low < 2 * GRID:
        return list(range(low, high + 1))
    return sorted({low + (high - low) * k // (GRID - 1) for k in range(GRID)})


def _spans(schedule_steps: Sequence[ScheduleStep]) -> Mapping[int, tuple[int, int]]:
    """For each layer its first and last schedule step."""
    spans: dict[int, tuple[int, int]] = {}
    for index, schedule_step in enumerate(schedule_steps):
        for layer in schedule_step.needs:
            first, _ = spans.get(layer, (index, index))
            spans[layer] = (first, index)
    return spans


@dataclass(frozen=True)
class _Point:
    """The inputs that all choices share."""

    schedule_steps: Sequence[ScheduleStep]
    layers: Sequence[LayerCost]
    rates: Rates
    spans: Mapping[int, tuple[int, int]]
    room_nbytes: int
    stages_nbytes: int
    world: int
    compute: tuple[float, float] | None
    checked: bool

    def evaluate(
        self, device: frozenset[int], kept: frozenset[int], streamed: frozenset[int] = frozenset(), *, strict: bool = False
    ) -> Choice | None:
        layers, world = self.layers, self.world
        placements = sum(layers[k].placement_nbytes + (layers[k].nbytes if world == 1 else 0) for k in device)
        placements += sum(layers[k].nbytes for k in streamed) + (self.stages_nbytes if streamed else 0)
        if placements > self.room_nbytes:
            return None
        taken = [placements] * len(self.schedule_steps)
        for k in kept:
            first, last = self.spans[k]
            for index in range(first, last):
                taken[index] += layers[k].kept_nbytes
        left = tuple(
            replace(schedule_step, room_nbytes=schedule_step.room_nbytes - taken[i])
            for i, schedule_step in enumerate(self.schedule_steps)
        )
        anchored = device | streamed if world == 1 else frozenset[int]()
        nbytes = [0 if k in anchored else layer.nbytes for k, layer in enumerate(layers)]
        try:
            plan = schedule(left, nbytes)
        except FitError:
            if strict:
                raise
            return None
        crossing = [0 if k in device else size for k, size in enumerate(nbytes)]
        work = self.work(device, kept, streamed, sum(crossing[k] for fetched in plan.fetches for k in fetched) // world)
        return Choice(
            device=device,
            streamed=streamed,
            kept=kept,
            schedule=plan,
            schedule_steps=left,
            up_nbytes=int(work.up_nbytes),
            down_nbytes=int(work.down_nbytes),
            seconds=self._seconds(work),
        )

    def _seconds(self, work: Work) -> float:
        return seconds(work, self.rates, overlapped=self.compute is not None, checked=self.checked)

    def work(self, device: frozenset[int], kept: frozenset[int], streamed: frozenset[int], up_nbytes: float) -> Work:
        again = sum(layer.again_seconds for k, layer in enumerate(self.layers) if layer.recomputable and k not in kept)
        forward, backward = self.compute or (0.0, again)  # if unknown, the compute that all choices share is left out
        there = device | streamed
        return Work(
            forward_seconds=forward,
            backward_seconds=backward,
            up_nbytes=up_nbytes,
            down_nbytes=sum(layer.down_nbytes for k, layer in enumerate(self.layers) if k not in there),
            passed_nbytes=sum(self.layers[k].placement_nbytes for k in streamed),
            host_nbytes=sum(layer.update_nbytes for k, layer in enumerate(self.layers) if k not in there),
            device_nbytes=sum(self.layers[k].update_nbytes for k in there),
        )

    def streaming(self, found: Choice, candidates: Sequence[int]) -> frozenset[int]:
        """The best number of candidates to stream, assuming that it only saves the fetches of their weights."""
        best = (found.seconds, 0)
        for count in range(1, len(candidates) + 1):
            streamed = _spread(candidates, count)
            up = max(0, found.up_nbytes - sum(self.layers[k].nbytes for k in streamed))
            work = self.work(found.device, found.kept, streamed, up)
            best = min(best, (self._seconds(work), count))
        return _spread(candidates, best[1])


def _spread(candidates: Sequence[int], count: int) -> frozenset[int]:
    """`count` of the candidates, evenly spaced."""
    return frozenset(candidates[(2 * k + 1) * len(candidates) // (2 * count)] for k in range(count))
