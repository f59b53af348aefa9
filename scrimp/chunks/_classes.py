"""Choosing, from a trace, what is kept and where: least predicted seconds within the budget.

Variables:
    A   layers whose home is the device: no traffic, updated there; each holds its weights, masters and states for good
    K   layers whose activations are kept from forward to backward; the others' are computed again
    the schedule of the rest (`_residency`): how often each layer's weights come

Seconds of a step = compute again (layers not in K) + bytes up / link up + bytes down / link down
                    + bytes the host's update touches / host rate + bytes the device's touches / device rate

Constraint, at every moment: A + weights there + kept activations + what the trace saw beside weights <= budget.

A grows from the first layers executed (their gradients come last and their weights are wanted first), K from the last
ones (their activations live the shortest). That leaves two numbers, searched on a grid that is refined around its best
point; every point is a full simulation of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scrimp.chunks._residency import Moment, Schedule, schedule
from scrimp.errors import FitError

GRID = 5


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second: over the link up and down, and touched by an update on the host and on the device."""

    up: float
    down: float
    host: float
    device: float


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer: what it takes on the device, and what more to have its home there; bytes of gradients that go home and
    that an update touches; bytes and seconds of its activations, if they can be computed again."""

    nbytes: int
    home_nbytes: int
    down_nbytes: int
    update_nbytes: int
    kept_nbytes: int = 0
    again_seconds: float = 0.0
    recomputable: bool = False
    movable: bool = True  # its home may be the device
    fixed: bool = False  # its home is the device: the host has no room for it


@dataclass(frozen=True, kw_only=True)
class Choice:
    device: frozenset[int]
    kept: frozenset[int]
    schedule: Schedule
    moments: tuple[Moment, ...]  # with the room that this choice leaves
    up_nbytes: int
    down_nbytes: int
    seconds: float  # predicted, without what every choice has to compute


def choose(
    moments: Sequence[Moment], layers: Sequence[LayerCost], rates: Rates, *, update_room_nbytes: int, world: int = 1
) -> Choice:
    """`room_nbytes` of the moments is what the trace left, with every recomputable layer recomputed and no home on the
    device; `update_room_nbytes` is what an update leaves for homes."""
    order = [layer for moment in moments for layer in moment.needs]
    fixed = [k for k, layer in enumerate(layers) if layer.fixed]
    movable = [*fixed, *(k for k in dict.fromkeys(order) if layers[k].movable and not layers[k].fixed)]
    recomputable = [k for k in reversed(dict.fromkeys(order)) if layers[k].recomputable]
    spans = _spans(moments)
    tried: dict[tuple[int, int], Choice | None] = {}

    def attempt(homes: int, keeps: int) -> Choice | None:
        if (homes, keeps) not in tried:
            device, kept = frozenset(movable[:homes]), frozenset(recomputable[:keeps])
            tried[homes, keeps] = _evaluate(moments, layers, rates, spans, device, kept, update_room_nbytes, world)
        return tried[homes, keeps]

    best = _refine(attempt, len(fixed), len(movable), len(recomputable))
    if best is None:
        _evaluate(moments, layers, rates, spans, frozenset(fixed), frozenset(), update_room_nbytes, world, strict=True)
        raise FitError("no choice of homes and kept activations fits")
    return best


def _refine(attempt: Callable[[int, int], Choice | None], least: int, homes: int, keeps: int) -> Choice | None:
    """Over homes from `least` on, and keeps from none on."""
    best: tuple[float, int, int] | None = None
    low, high = (least, 0), (homes, keeps)
    while True:
        for a in _grid(low[0], high[0]):
            for k in _grid(low[1], high[1]):
                choice = attempt(a, k)
                # Of equal seconds the one that holds less.
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
        new_high = tuple(min((homes, keeps)[i], at[i] + steps[i]) for i in range(2))
        low, high = (new_low[0], new_low[1]), (new_high[0], new_high[1])


def _grid(low: int, high: int) -> list[int]:
    if high - low < 2 * GRID:
        return list(range(low, high + 1))
    return sorted({low + (high - low) * k // (GRID - 1) for k in range(GRID)})


def _spans(moments: Sequence[Moment]) -> Mapping[int, tuple[int, int]]:
    """For each layer its first and last moment of use."""
    spans: dict[int, tuple[int, int]] = {}
    for index, moment in enumerate(moments):
        for layer in moment.needs:
            first, _ = spans.get(layer, (index, index))
            spans[layer] = (first, index)
    return spans


def _evaluate(
    moments: Sequence[Moment],
    layers: Sequence[LayerCost],
    rates: Rates,
    spans: Mapping[int, tuple[int, int]],
    device: frozenset[int],
    kept: frozenset[int],
    update_room_nbytes: int,
    world: int,
    strict: bool = False,
) -> Choice | None:
    homes = sum(layers[k].home_nbytes + (layers[k].nbytes if world == 1 else 0) for k in device)
    if homes > update_room_nbytes:
        return None
    taken = [homes] * len(moments)
    for k in kept:
        first, last = spans[k]
        for index in range(first, last):
            taken[index] += layers[k].kept_nbytes
    left = tuple(replace(moment, room_nbytes=moment.room_nbytes - taken[i]) for i, moment in enumerate(moments))
    anchored = device if world == 1 else frozenset()
    nbytes = [0 if k in anchored else layer.nbytes for k, layer in enumerate(layers)]
    try:
        plan = schedule(left, nbytes)
    except FitError:
        if strict:
            raise
        return None
    crossing = [0 if k in device else size for k, size in enumerate(nbytes)]
    up = sum(crossing[k] for fetched in plan.fetches for k in fetched) // world
    down = sum(layer.down_nbytes for k, layer in enumerate(layers) if k not in device)
    seconds = (
        up / rates.up
        + down / rates.down
        + sum(layer.update_nbytes for k, layer in enumerate(layers) if k not in device) / rates.host
        + sum(layers[k].update_nbytes for k in device) / rates.device
        + sum(layer.again_seconds for k, layer in enumerate(layers) if layer.recomputable and k not in kept)
    )
    return Choice(device=device, kept=kept, schedule=plan, moments=left, up_nbytes=up, down_nbytes=down, seconds=seconds)
