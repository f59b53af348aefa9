"""Which gathers start before they are due, and which reductions end after they have started: beside the operators between.

A gather starts when the bucket before it has arrived, so that one bucket is on its way while operators use another. A reduction
ends before the next one starts. Where there is no room for that, a gather starts later, and a reduction ends earlier; or both run
where they are due. A move on its way takes what it sends and what arrives: `footprint.rooms` says where that stays below the peak
of the step, less what buckets take. So overlap adds nothing to the peak.

A move starts, and ends, where the program asks for a weight or gives a gradient, or at the end of a layer's pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from scrimp.lower.footprint import Hold, Pass, check_holds, gathered_nbytes
from scrimp.lower.model import Lowered
from scrimp.lower.steps import Accumulate, Call, Gather
from scrimp.lower.weights.buckets import Buckets, Later, gather_key, sum_key, tile_nbytes
from scrimp.move import ITEMSIZE

Hook = tuple[Pass, str, int]  # of a pass its gather or gradient ("sum") of this number, or its "end"


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """`starts`: behind a hook, the gathers that start there, each named by its pass and number. `ends`: of reductions that are
    not waited for where they start, before which gradient, or at the end of which pass, they are. `room_nbytes`: of each pass,
    what may be held besides before its first step. `holds`: what moves take on their way."""

    starts: Mapping[Hook, tuple[tuple[Pass, int], ...]] = field(default_factory=dict)
    ends: Mapping[Hook, Hook] = field(default_factory=dict)
    room_nbytes: Mapping[Pass, int] = field(default_factory=dict)
    holds: tuple[Hold, ...] = ()


def overlap_of(lowered: Lowered, buckets: Buckets, later: Later) -> Overlap:
    line = _Line(lowered, buckets)
    starts = _starts(lowered, buckets, line)
    ends = _ends(lowered, later, buckets, line)
    check_holds(lowered, buckets.left, line.holds)
    return Overlap(starts=starts, ends=ends, room_nbytes=line.first, holds=tuple(line.holds))


class _Line:
    """All steps of all passes one behind the other, with a place behind each pass. `room`: what is left at each place. `first`:
    at the first step of each pass, and just before it."""

    def __init__(self, lowered: Lowered, buckets: Buckets) -> None:
        self.order = [(lowered.first + k, backward) for k, backward in _passes(len(lowered.layers))]
        self.at: dict[Hook, int] = {}
        self.starts: dict[Pass, int] = {}
        self.room: list[int] = []
        self.holds: list[Hold] = []
        calls = [0]
        for key in self.order:
            layer = lowered.layers[key[0] - lowered.first]
            steps, offset = (layer.behind if key[1] else layer.ahead).steps, len(self.room)
            self.starts[key] = offset
            for kind, of in (("gather", Gather), ("sum", Accumulate)):
                places = [offset + at for at, step in enumerate(steps) if isinstance(step, of)]
                self.at.update({(key, kind, number): place for number, place in enumerate(places)})
            self.room += buckets.left[key]
            self.at[key, "end", 0] = len(self.room) - 1
            calls += [*(int(isinstance(step, Call)) for step in steps), 0]
        self._calls = [*accumulate(calls)]
        self.hooks = sorted((place, hook) for hook, place in self.at.items())
        self.first = {key: self.room[self.starts[key]] for key in self.order}

    def computes(self, start: int, stop: int) -> bool:
        """Whether an operator runs at a place in [start, stop)."""
        return self._calls[stop] > self._calls[start]

    def back(self, stop: int, nbytes: int) -> int:
        """The first place from which there is room until `stop`, which is not one of them."""
        start = stop
        while start and self.room[start - 1] >= nbytes:
            start -= 1
        return start

    def onward(self, start: int, nbytes: int) -> int:
        """The place at which there is no more room, from `start` on."""
        stop = start
        while stop < len(self.room) and self.room[stop] >= nbytes:
            stop += 1
        return stop

    def hold(self, start: int, stop: int, nbytes: int) -> None:
        """At the places [start, stop)."""
        for place in range(start, stop):
            self.room[place] -= nbytes
        self.holds.append(Hold(start=start, stop=stop, nbytes=nbytes))
        for key, place in self.starts.items():
            if start <= place <= stop:
                self.first[key] -= nbytes


def _passes(layers: int) -> Iterator[tuple[int, bool]]:
    yield from ((k, False) for k in range(layers))
    yield from ((k, True) for k in reversed(range(layers)))


def _starts(lowered: Lowered, buckets: Buckets, line: _Line) -> dict[Hook, tuple[tuple[Pass, int], ...]]:
    found: dict[Hook, tuple[tuple[Pass, int], ...]] = {}
    before: int | None = None  # the place of the bucket before
    for key in line.order:
        layer, each = lowered.layers[key[0] - lowered.first], buckets.passes[key]
        steps = [step for step in (layer.behind if key[1] else layer.ahead).steps if isinstance(step, Gather)]
        for number, group in enumerate(each.bring):
            rest = [lowered.rest[buckets.names[key][other]] for other in group]
            if not group or gather_key(rest[0]) is None or (key[1] and rest[0].name in each.kept):
                continue
            due, nbytes = line.at[key, "gather", number], sum(gathered_nbytes(lowered, layer, steps[other]) for other in group)
            if before is not None:
                # In a bucket, and if it is spread, a copy for each member is on its way beside what arrives.
                taken = 2 * nbytes if len(group) > 1 or number in each.spread else nbytes
                # Shares that other ranks have updated come when their layer begins.
                updated_here = all(one.weight == one.states or not one.trained for one in rest)
                first = max(line.back(due, taken), before if updated_here else line.starts[key])
                hook = next((hook for place, hook in line.hooks if first <= place < due and hook[1] != "end"), None)
                if hook is not None and line.computes(line.at[hook], due):
                    line.hold(line.at[hook], due, taken)
                    found[hook] = (*found.get(hook, ()), (key, number))
            before = due
    return found


def _ends(lowered: Lowered, later: Later, buckets: Buckets, line: _Line) -> dict[Hook, Hook]:
    made: list[tuple[Hook, int]] = []
    for key in line.order:
        layer = lowered.layers[key[0] - lowered.first]
        steps = [step for step in (layer.behind if key[1] else layer.ahead).steps if isinstance(step, Accumulate)]
        for number, group in enumerate(buckets.passes[key].sum):
            rest = [lowered.rest[layer.names[steps[other].weight]] for other in group]
            if group and sum_key(rest[0], steps[group[0]], later) is not None:
                # What is sent, what arrives, and in the end the shares.
                shares = sum(one.numel(one.gradient, lowered.mesh) * ITEMSIZE[one.dtype] for one in rest)
                nbytes = 2 * sum(tile_nbytes(lowered, one) for one in rest) + shares
                made.append(((key, "sum", number), nbytes))
    found: dict[Hook, Hook] = {}
    last = len(line.room) - 1
    for (hook, nbytes), after in zip(made, [*(line.at[each] for each, _ in made[1:]), last], strict=False):
        start = line.at[hook] + 1
        stop = line.onward(start, nbytes)
        until = next(
            (each for place, each in reversed(line.hooks) if start <= place < min(stop, after + 1) and each[1] != "gather"), None
        )
        if until is not None and line.computes(start, line.at[until]):
            line.hold(start, line.at[until] + 1, nbytes)
            found[hook] = until
    return found
