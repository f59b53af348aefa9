"""Which moves of weights and gradients run together: small ones cost as much time as large ones.

A bucket of gathers runs where the first of them is due; the other weights are held until an operator needs them. A bucket of
reductions runs where the last of them is due; the gradients before it are held. A bucket grows as long as there is room for that:
room that the step does not need at its peak (`footprint.rooms`). So buckets take time off a step, and add nothing to its peak.

Only moves along the same axes, in the same dtype, can be one move. Weights that the last layer gathers in its forward stay for
its backward, which follows at once, if there is room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from scrimp.lower.footprint import Pass, gathered_nbytes, rooms
from scrimp.lower.model import Lowered, LoweredLayer
from scrimp.lower.steps import Accumulate, Free, Gather, Step
from scrimp.lower.weights.rest import Rest
from scrimp.move import ITEMSIZE

Key = tuple[object, ...]
Later = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class PassBuckets:
    """`bring[n]`: the gathers of the pass, by number, that run where gather n is due. `sum[n]`: its gradients, by number, that
    are reduced where gradient n is made. `kept`: weights that stay from the forward to the backward. `spread`: gathers that run
    alone, and have room for a copy for each member."""

    bring: tuple[tuple[int, ...], ...]
    sum: tuple[tuple[int, ...], ...]
    kept: frozenset[str] = frozenset()
    spread: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """`names`: the weights that each pass gathers, in order. `left`: the room that buckets leave at each step of a pass, and
    behind it. `room_nbytes`: what may be held besides, when no layer runs."""

    passes: Mapping[Pass, PassBuckets] = field(default_factory=dict)
    names: Mapping[Pass, tuple[str, ...]] = field(default_factory=dict)
    left: Mapping[Pass, Sequence[int]] = field(default_factory=dict)
    room_nbytes: int = 0


def buckets_of(
    lowered: Lowered, later: Later, room: dict[Pass, list[int]] | None = None, *, keeps: bool = True
) -> Buckets:  # fmt: skip
    """`later`: the axes along which a gradient is summed at the end of the step (`later_axes`). Of a piece of a pipeline: `room`
    counts all micro-batches in flight (`in_flight.py`), and `keeps` says whether its backward follows its forward at once."""
    room = rooms(lowered) if room is None else room
    found: dict[Pass, PassBuckets] = {}
    names: dict[Pass, tuple[str, ...]] = {}
    known: dict[tuple[int, tuple[int, ...]], tuple[PassBuckets, list[int]]] = {}
    last = len(lowered.layers) - 1
    kept = _kept(lowered, room[lowered.first + last, False], room[lowered.first + last, True]) if keeps else frozenset()
    for k, layer in enumerate(lowered.layers):
        for backward, program in ((False, layer.ahead), (True, layer.behind)):
            key = (lowered.first + k, backward)
            steps, left = program.steps, room[key]
            names[key] = tuple(layer.names[step.weight] for step in steps if isinstance(step, Gather))
            same = (id(program), tuple(left))
            if same not in known:
                stays = kept if k == last else frozenset()
                bring = _gathers(lowered, layer, steps, left, stays if backward else ())
                made = PassBuckets(
                    bring=bring,
                    spread=_spread(lowered, layer, steps, left, bring, stays if backward else ()),
                    sum=_sums(lowered, layer, steps, left, later),
                    kept=stays,
                )
                known[same] = made, left
            found[key], room[key] = known[same]
    return Buckets(passes=found, names=names, left=room, room_nbytes=_most(room))


def gather_key(each: Rest) -> Key | None:
    """Gathers with equal keys can be one move; None if nothing is moved."""
    return (each.weight, each.dtype) if each.weight else None


def sum_key(each: Rest, step: Accumulate, later: Later) -> Key | None:
    """Reductions with equal keys can be one move; None if nothing is moved, or if the gradient is not the reduction's own."""
    axes = later.get(each.name, ())
    over = each.gradient if axes else each.states
    if step.before.dims != each.use.dims or not step.donate or ((), step.before.partial) == (over, axes):
        return None
    return step.before.partial, over, axes, each.dtype


def _kept(lowered: Lowered, forward: list[int], backward: list[int]) -> frozenset[str]:
    """The weights of the last layer for which there is room from their last use in its forward to their first in its backward."""
    layer, found = lowered.layers[-1], set()
    front, back = layer.ahead, layer.behind
    again: dict[str, int] = {}
    for at, step in enumerate(back.steps):
        if isinstance(step, Gather):
            again.setdefault(layer.names[step.weight], at)
    for step in front.steps:
        if not isinstance(step, Gather) or layer.names[step.weight] not in again:
            continue
        name, nbytes = layer.names[step.weight], gathered_nbytes(lowered, layer, step)
        views = {slot for slot, each in enumerate(front.slots) if each.storage == step.target}
        end = max(at for at, each in enumerate(front.steps) if isinstance(each, Free) and views & {*each.slots})
        free = [*range(end, len(front.steps))], [*range(again[name])]
        if nbytes and name not in found and min((*(forward[k] for k in free[0]), *(backward[k] for k in free[1]))) >= nbytes:
            found.add(name)
            for left, steps in zip((forward, backward), free, strict=True):
                for k in steps:
                    left[k] -= nbytes
    return frozenset(found)


def _gathers(
    lowered: Lowered, layer: LoweredLayer, steps: Sequence[Step], left: list[int], kept: Collection[str] = ()
) -> tuple[tuple[int, ...], ...]:
    due = [(at, step) for at, step in enumerate(steps) if isinstance(step, Gather)]
    bring: list[list[int]] = [[] for _ in due]
    first: dict[Key, int] = {}  # of the open bucket
    for number, (at, step) in enumerate(due):
        each = lowered.rest[layer.names[step.weight]]
        key, nbytes = gather_key(each), gathered_nbytes(lowered, layer, step)
        if key is None or each.name in kept:
            bring[number].append(number)
            continue
        if key in first:
            head = first[key]
            start = due[head][0]
            # While it runs: all tiles, and beside them the flat array in which they arrive, and the shares that are sent.
            alone = gathered_nbytes(lowered, layer, due[head][1]) if len(bring[head]) == 1 else 0
            flat = (alone + nbytes) + (alone + nbytes) // prod(lowered.mesh.axis_size(axis) for axis in each.weight)
            if left[start] >= nbytes + flat and all(room >= nbytes for room in left[start + 1 : at]):
                left[start] -= nbytes + flat
                for between in range(start + 1, at):
                    left[between] -= nbytes
                bring[head].append(number)
                continue
        first[key] = number
        bring[number].append(number)
    return tuple(map(tuple, bring))


def _spread(
    lowered: Lowered,
    layer: LoweredLayer,
    steps: Sequence[Step],
    left: list[int],
    bring: Sequence[tuple[int, ...]],
    kept: Collection[str],
) -> frozenset[int]:
    """The gathers that run alone for which there is room for as many bytes again."""
    found = set()
    for number, (at, step) in enumerate((at, step) for at, step in enumerate(steps) if isinstance(step, Gather)):
        each, nbytes = lowered.rest[layer.names[step.weight]], gathered_nbytes(lowered, layer, step)
        if bring[number] == (number,) and gather_key(each) is not None and each.name not in kept and left[at] >= nbytes:
            left[at] -= nbytes
            found.add(number)
    return frozenset(found)


def _sums(
    lowered: Lowered, layer: LoweredLayer, steps: Sequence[Step], left: list[int], later: Later
) -> tuple[tuple[int, ...], ...]:
    made = [(at, step) for at, step in enumerate(steps) if isinstance(step, Accumulate)]
    waiting: list[list[int]] = [[] for _ in made]
    last: dict[Key, int] = {}  # of the open bucket
    for number, (at, step) in enumerate(made):
        each = lowered.rest[layer.names[step.weight]]
        key = sum_key(each, step, later)
        waiting[number].append(number)
        if key is None:
            continue
        if key in last:
            before = last[key]
            held = sum(tile_nbytes(lowered, lowered.rest[layer.names[made[other][1].weight]]) for other in waiting[before])
            # While it runs: what is packed and what arrives, each as large as all gradients; then the shares.
            most = 2 * held + tile_nbytes(lowered, each) + held // prod(map(lowered.mesh.axis_size, each.states))
            if left[at] >= most and all(room >= held for room in left[made[before][0] + 1 : at]):
                left[at] -= most
                for between in range(made[before][0] + 1, at):
                    left[between] -= held
                waiting[number] = [*waiting[before], number]
                waiting[before] = []
        last[key] = number
    return tuple(map(tuple, waiting))


def tile_nbytes(lowered: Lowered, each: Rest) -> int:
    """Of a gradient, flat."""
    return each.flat_shape(lowered.mesh)[1] * ITEMSIZE[each.dtype]


def _most(room: Mapping[Pass, Sequence[int]]) -> int:
    """The room at the step that needs least: so much is there, at least, when no layer runs."""
    return max((left for each in room.values() for left in each), default=0)


def chunks(nbytes: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indices in order, as many together as stay within a limit of bytes, at least one."""
    chunk: list[int] = []
    for index, each in enumerate(nbytes):
        if chunk and sum(nbytes[k] for k in chunk) + each > limit:
            yield chunk
            chunk = []
        chunk.append(index)
    if chunk:
        yield chunk
