"""Bytes of a training step, step by step: what slots hold while a step runs, and the most that may be live then.

Model data at rest is constant and left out, and so is the batch. `held` counts slots alone, and is never more than what is live.
`most` adds what moves and operators take besides, by the bounds that they keep, and is never less. So `room` of a step can be
spent there, on moves that run earlier or later, without raising the peak of the whole step.

The walk follows `Runner`: an output lives until the last layer that reads it has it, a saved slot until its layer's backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from scrimp.errors import RunError
from scrimp.lower.model import Lowered, LoweredLayer
from scrimp.lower.moves import hops
from scrimp.lower.steps import Accumulate, Ahead, Behind, Buffer, Call, Gather, Move, Offload, Reduce, Step, filled
from scrimp.lower.steps import Free as Frees
from scrimp.lower.weights.rest import Rest
from scrimp.move import ITEMSIZE, stage_nbytes
from scrimp.planner import Placed

Pass = tuple[int, bool]  # a layer, and whether it is its backward
Key = tuple[int | None, str]


@dataclass(frozen=True, kw_only=True)
class PassBytes:
    """By step of the pass. `after`: the most behind it, before the next pass begins."""

    held: tuple[int, ...]
    most: tuple[int, ...]
    after: int


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Bytes besides, at the places [start, stop): the steps of all passes in their order, and behind each pass one place more."""

    start: int
    stop: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Border:
    """What a piece of a pipeline exchanges with other pieces. `takes`: the bytes of its inputs, by name. `through`: the inputs
    that it also passes on. `leaves`: its outputs that others read; `arrives`: those whose gradients come from there. `passed`:
    bytes of values, and of gradients, that only pass through. Without stages nothing crosses, and the batch is left out."""

    takes: Mapping[str, int] = field(default_factory=dict)
    through: frozenset[str] = frozenset()
    leaves: frozenset[Key] = frozenset()
    arrives: frozenset[Key] = frozenset()
    passed: tuple[int, int] = (0, 0)


def footprint(lowered: Lowered) -> Mapping[Pass, PassBytes]:
    """Of each pass of each layer."""
    return piece_footprint(lowered, Border())[0]


def piece_footprint(lowered: Lowered, border: Border) -> tuple[Mapping[Pass, PassBytes], int]:
    """Of each pass of each layer, for one micro-batch alone; and the bytes that its forward leaves for its backward."""
    walk = _Walk(lowered, border)
    walk.forward()
    saved = walk.total
    walk.backward()
    return walk.found, saved


def rooms(lowered: Lowered) -> dict[Pass, list[int]]:
    """By step, and behind the last one, the bytes that may be added there without raising the step's peak; negative where the
    bounds say nothing."""
    found = footprint(lowered)
    peak = max(max(each.held) for each in found.values() if each.held)
    return {key: [peak - nbytes for nbytes in (*each.most, each.after)] for key, each in found.items()}


def check_holds(lowered: Lowered, left: Mapping[Pass, Sequence[int]], holds: Sequence[Hold]) -> None:
    """Counts again. Raises if moves on their way, beside what buckets take of the room, raise the peak of the step. `left`: the
    room that buckets leave."""
    found = rooms(lowered)
    room = [nbytes for each in found.values() for nbytes in each]
    after = [nbytes for key in found for nbytes in left[key]]
    taken = [before - now for before, now in zip(room, after, strict=True)]
    held = set()
    for hold in holds:
        for place in range(hold.start, hold.stop):
            taken[place] += hold.nbytes
            held.add(place)
    for place in sorted(held):
        if taken[place] > room[place]:
            raise RunError(
                f"buckets and moves beside operators would take {taken[place]:,} bytes at place {place} of the step, where the "
                f"plan leaves {room[place]:,}: this is a fault of scrimp; please report the plan"
            )


class _Walk:
    """`live`: references to each storage. A storage is named by the layer and the slot that made it."""

    def __init__(self, lowered: Lowered, border: Border) -> None:
        self.lowered, self.border, self.sizes = lowered, border, dict(lowered.mesh.axes)
        self.found: dict[Pass, PassBytes] = {}
        self.live: Counter[int] = Counter()
        self.nbytes: list[int] = [0]  # by storage; storage 0 stands for all that takes no bytes
        self.total = 0
        self.storages: list[dict[int, int]] = [{} for _ in lowered.layers]  # by layer: the storage of each slot
        self.waiting: dict[str, int] = {}  # bytes of gradients of which more summands come
        self.seen: Counter[str] = Counter()

    def forward(self) -> None:
        readers = Counter((source.layer, source.name) for layer in self.lowered.layers for _, source in layer.sources)
        made: dict[Key, int] = {(None, name): self._made(nbytes) for name, nbytes in self.border.takes.items()}
        leaving = [self._made(self.border.passed[0]), *(self._held(made[None, name]) for name in self.border.through)]
        for k, layer in enumerate(self.lowered.layers):
            here = self.storages[k]
            for (_, source), (_, slot) in zip(layer.sources, layer.ahead.inputs, strict=True):
                key = (source.layer, source.name)
                here[slot] = made.get(key, 0)
                self._hold(here[slot])
                readers[key] -= 1
                if not readers[key]:
                    self._drop(made.pop(key, 0))
            self._run(k, layer, layer.ahead)
            self._behind(k, backward=False)
            for name, slot in layer.ahead.outputs:
                if readers.get((k, name)):
                    made[k, name] = here[slot]
                    self._hold(here[slot])
                if (k, name) in self.border.leaves:  # a partial sum is completed, in another tensor
                    partial = layer.ahead.slots[slot].place.partial
                    leaving.append(self._made(self.nbytes[here[slot]]) if partial else self._held(here[slot]))
            for slot in {slot for _, slot in layer.ahead.outputs} - {*layer.ahead.saved}:
                self._drop(here[slot])
        for storage in (*leaving, *made.values()):
            self._drop(storage)

    def backward(self) -> None:
        self._made(self.border.passed[1])
        arrived = self._arrived()
        for k in reversed(range(len(self.lowered.layers))):
            layer, here = self.lowered.layers[k], self.storages[k]
            places = dict(layer.arrives)
            for output, slot in layer.behind.tangents:
                here[slot] = arrived.pop((k, output), -1)
                if here[slot] < 0:
                    here[slot] = self._made(self._nbytes(layer, layer.behind, slot, places[output]))
            self._run(k, layer, layer.behind)
            sources = dict(layer.sources)
            leaving = {slot for _, slot in layer.behind.gradients}
            self._behind(k, backward=True)
            for name, slot in layer.behind.gradients:
                key = (sources[name].layer, sources[name].name)
                if key[0] is None and not (self.border.takes and key[1] in self.lowered.gradients):
                    continue
                place = layer.behind.slots[slot].place
                wanted = place if key[0] is None else dict(self.lowered.layers[key[0]].arrives).get(key[1], place)
                dtype = layer.chosen.values[layer.behind.slots[slot].value].dtype
                moving = self._moving(place, wanted, dtype) if place != wanted else 0
                self._behind(k, backward=True, more=moving + (self.nbytes[here[slot]] if key in arrived else 0))
                if key in arrived:  # their sum is another tensor
                    self._drop(arrived[key])
                    arrived[key] = self._made(self.nbytes[here[slot]])
                elif key[0] is None and self.lowered.gradients[key[1]] != layer.behind.slots[slot].place:  # resharded
                    arrived[key] = self._made(self._nbytes(layer, layer.behind, slot, self.lowered.gradients[key[1]]))
                else:
                    arrived[key] = here[slot]
                    self._hold(here[slot])
            for slot in leaving:
                self._drop(here[slot])

    def _arrived(self) -> dict[Key, int]:
        """The gradients that other pieces send."""
        found: dict[Key, int] = {}
        for k, layer in enumerate(self.lowered.layers):
            places = dict(layer.arrives)
            for output, slot in layer.behind.tangents:
                if (k, output) in self.border.arrives:
                    found[k, output] = self._made(self._nbytes(layer, layer.behind, slot, places[output]))
        return found

    def _run(self, k: int, layer: LoweredLayer, program: Ahead | Behind) -> None:
        here, held, most = self.storages[k], [], []
        for step in program.steps:
            before = self.total
            for slot in filled(step):
                owner = program.slots[slot].storage
                if owner != slot:
                    here[slot] = here[owner]
                    self._hold(here[slot])
                else:
                    here[slot] = self._made(self._filled(layer, program, step, slot))
            donated = self._donated(step, here)
            held.append(max(before, self.total - donated))
            most.append(self.total + sum(self.waiting.values()) + self._besides(layer, step))
            if isinstance(step, Frees):
                for slot in step.slots:
                    self._drop(here[slot])
            elif isinstance(step, Accumulate):
                self._accumulate(layer.names[step.weight])
        self.found[self.lowered.first + k, isinstance(program, Behind)] = PassBytes(held=tuple(held), most=tuple(most), after=0)

    def _behind(self, k: int, *, backward: bool, more: int = 0) -> None:
        """Notes what is live behind a pass."""
        key = (self.lowered.first + k, backward)
        now = self.total + sum(self.waiting.values()) + more
        self.found[key] = replace(self.found[key], after=max(self.found[key].after, now))

    def _accumulate(self, name: str) -> None:
        """A rank's share of a gradient waits until all its summands have come, unless gradients have a place at rest."""
        self.waiting[name] = self._share(self.lowered.rest[name])
        self.seen[name] += 1
        if self.seen[name] == len(self.lowered.partials[name]):
            del self.waiting[name]

    def _share(self, each: Rest) -> int:
        return each.numel(each.gradient, self.lowered.mesh) * ITEMSIZE[each.dtype]

    def _filled(self, layer: LoweredLayer, program: Ahead | Behind, step: Step, slot: int) -> int:
        if isinstance(step, (Buffer, Offload)):
            return 0
        if isinstance(step, Gather):
            return gathered_nbytes(self.lowered, layer, step)
        return self._nbytes(layer, program, slot, program.slots[slot].place)

    def _nbytes(self, layer: LoweredLayer, program: Ahead | Behind, slot: int, place: Placed) -> int:
        return place.numel(self.sizes) * ITEMSIZE[layer.chosen.values[program.slots[slot].value].dtype]

    def _donated(self, step: Step, here: Mapping[int, int]) -> int:
        """Bytes that the step frees before it ends, at most."""
        if isinstance(step, (Move, Accumulate)) and step.donate:
            return self.nbytes[here[step.source]]
        return 0

    def _besides(self, layer: LoweredLayer, step: Step) -> int:
        """The most that a step takes besides the slots that it reads and fills."""
        match step:
            case Call():
                return layer.chosen.ops[step.op].scratch_nbytes
            case Move():
                return self._moving(step.before, step.after, layer.chosen.values[step.value].dtype)
            case Reduce():
                return self._moving(step.before, step.before.complete(), layer.chosen.values[step.value].dtype)
            case Gather():
                each = self.lowered.rest[layer.names[step.weight]]
                return gathered_nbytes(self.lowered, layer, step) if len(each.weight) > 1 else 0
            case Accumulate():
                return self._summing(self.lowered.rest[layer.names[step.weight]], step, layer.chosen.values[step.value].order)
        return 0

    def _summing(self, each: Rest, step: Accumulate, order: Sequence[int]) -> int:
        """What a reduction to the shares takes: the summands that arrive, the share, and a flat copy if the gradient is padded or
        does not lie flat in memory."""
        flat = each.flat_shape(self.lowered.mesh)[1]
        copies = 1 + (flat != each.tile_numel(self.lowered.mesh) or bool(order)) + (len(step.before.partial) > 1)
        most = copies * flat * ITEMSIZE[each.dtype]
        if step.before.dims != each.use.dims:
            most += self._moving(step.before, each.use, each.dtype)
        return most + self._share(each)

    def _moving(self, before: Placed, after: Placed, dtype: str) -> int:
        """The bound of a run (`scrimp.move`): two tiles of the larger size and a staging buffer, beside the source."""
        most = 0
        for shape, src, dst, _ in hops(before, after, self.lowered.mesh):
            tile = prod(shape) * ITEMSIZE[dtype] // min(prod(each.counts(self.lowered.mesh)) for each in (src, dst))
            stays = src.partial or not {axis for dim in src.dims for axis in dim} & {axis for dim in dst.dims for axis in dim}
            most = max(most, 2 * tile + (0 if stays else stage_nbytes(tile)))
        return most

    def _made(self, nbytes: int) -> int:
        if not nbytes:
            return 0
        self.nbytes.append(nbytes)
        self._hold(len(self.nbytes) - 1)
        return len(self.nbytes) - 1

    def _held(self, storage: int) -> int:
        self._hold(storage)
        return storage

    def _hold(self, storage: int) -> None:
        if storage and not self.live[storage]:
            self.total += self.nbytes[storage]
        self.live[storage] += 1

    def _drop(self, storage: int) -> None:
        self.live[storage] -= 1
        if storage and not self.live[storage]:
            self.total -= self.nbytes[storage]


def gathered_nbytes(lowered: Lowered, layer: LoweredLayer, step: Gather) -> int:
    """Of the tile that a gather makes; none where the weight at rest is the tile."""
    each = lowered.rest[layer.names[step.weight]]
    return each.flat_shape(lowered.mesh)[1] * ITEMSIZE[each.dtype] if each.weight else 0
