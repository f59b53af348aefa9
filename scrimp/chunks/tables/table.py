"""The chunk table: the position of every parameter's elements.

A layer's parameters lie end to end in the layer's own flat space, each aligned to 64 elements. The space is cut into chunks of
one capacity; a tensor larger than a chunk spans several. Weights, gradients, master weights and optimizer states all use the
same table, so element k of one belongs to element k of the others.

Chunks end with their layer: no chunk serves two layers, so a layer can be fetched and evicted by itself. The only padding is the
64-element alignment, which also keeps vector lanes, and so bits, the same for every chunk size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from scrimp.errors import RunError

ALIGN = 64


@dataclass(frozen=True, kw_only=True)
class Share:
    """Under a plan: the part of a slot that this rank updates, where other ranks update the rest. `updated`: its elements
    [start, stop) of the slot. `summed`: those whose gradient this rank accumulates; they include the updated ones.
    `gradient_start` and `state_start`: where both begin in the layer's arenas of gradients and of states. `held`: False of a
    parameter that only other pipeline stages hold; its slot is empty here."""

    updated: tuple[int, int]
    summed: tuple[int, int]
    gradient_start: int
    state_start: int
    held: bool = True


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A parameter's place in its layer's flat space, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    trainable: bool
    share: Share | None = None

    @property
    def held(self) -> bool:
        """Whether this rank's pipeline stage holds the parameter."""
        return self.share is None or self.share.held

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, kw_only=True)
class LayerSpace:
    """One layer's slots, trained ones first, and the layer's size with padding."""

    path: str
    slots: tuple[Slot, ...]
    numel: int
    trained: int  # elements of the trained part; only this part has masters and states
    needs: tuple[int, ...]  # layers that must be resident with this one: itself, and the owners of parameters it shares
    wide: bool = False  # fp32 whatever the precision: parameters of modules with running statistics
    wrapped: bool = True  # False: it has no module of its own, but is the fp32 part of the next layer, and fetched with it
    summed: int | None = None  # elements of accumulated gradients, where a plan makes them other than the trained ones

    @property
    def padding(self) -> int:
        return self.numel - sum(slot.numel for slot in self.slots)


@dataclass(frozen=True, kw_only=True)
class ChunkTable:
    """The slots of all layers, and the chunk size."""

    layers: tuple[LayerSpace, ...]
    capacity: int

    @cached_property
    def padding(self) -> int:
        return sum(layer.padding for layer in self.layers)

    def chunks(self, layer: int) -> Iterator[tuple[int, int]]:
        """The [start, stop) of each chunk of a layer, in the layer's space."""
        numel = self.layers[layer].numel
        for start in range(0, numel, self.capacity):
            yield start, min(start + self.capacity, numel)

    def check(self) -> ChunkTable:
        """Check that slots neither overlap nor leave their layer, and that every parameter has exactly one."""
        seen: set[str] = set()
        for layer in self.layers:
            position = 0
            for slot in layer.slots:
                if slot.start < position or slot.stop > layer.numel:
                    raise RunError(f"slot {slot.name} [{slot.start}, {slot.stop}) of layer '{layer.path}' overlaps or leaves it")
                if slot.name in seen:
                    raise RunError(f"parameter {slot.name} has two slots")
                if slot.start % ALIGN and slot.share is None:
                    raise RunError(f"slot {slot.name} starts at {slot.start}, off the {ALIGN}-element border")
                if slot.trainable and slot.share is None and slot.stop > layer.trained:
                    raise RunError(f"slot {slot.name} is trained, but lies beyond {layer.trained}, where states end")
                seen.add(slot.name)
                position = slot.stop
        if self.capacity % ALIGN or self.capacity < ALIGN:
            raise RunError(f"a chunk of {self.capacity} elements is not a multiple of {ALIGN}")
        return self


@dataclass(frozen=True, kw_only=True)
class Row:
    """A parameter that needs a slot."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    wide: bool = False


def build_table(layers: Sequence[tuple[str, Sequence[Row], Sequence[str]]], *, capacity: int, world: int = 1) -> ChunkTable:
    """`layers`: (path, parameters, names of shared parameters) in order of the module tree. Chunks can be cut into `world`
    equal parts, each a multiple of the alignment. A layer with wide and other parameters becomes two: the wide one comes first,
    and the other needs it."""
    grain = ALIGN * world
    spaces: list[LayerSpace] = []
    owner: dict[str, int] = {}
    for path, parameters, shared in layers:
        kinds = [kind for kind in (True, False) if any(row.wide == kind for row in parameters)] or [False]
        wide_part: list[int] = []
        for wide in kinds:
            index = len(spaces)
            slots, position, trained = [], 0, 0
            for row in sorted((row for row in parameters if row.wide == wide), key=lambda row: not row.trainable):
                slots.append(Slot(name=row.name, shape=row.shape, start=position, trainable=row.trainable))
                position = -(-(position + prod(row.shape)) // ALIGN) * ALIGN
                trained = position if row.trainable else trained
                owner[row.name] = index
            position = -(-position // grain) * grain
            last = wide == kinds[-1]
            needs = tuple(dict.fromkeys([index, *wide_part, *(owner[name] for name in shared if last)]))
            spaces.append(
                LayerSpace(path=path, slots=tuple(slots), numel=position, trained=trained, needs=needs, wide=wide, wrapped=last)
            )
            wide_part.append(index)
    return ChunkTable(layers=tuple(spaces), capacity=max(grain, capacity // grain * grain)).check()


def runs_of(arrived: list[tuple[Slot, bool]]) -> list[tuple[int, int, bool]]:
    """[start, stop) of adjacent slots with the same flag, so that one copy moves them."""
    runs: list[tuple[int, int, bool]] = []
    for slot, first in sorted(arrived, key=lambda entry: entry[0].start):
        if runs and runs[-1][1:] == (slot.start, first):
            runs[-1] = (runs[-1][0], slot.stop, first)
        else:
            runs.append((slot.start, slot.stop, first))
    return runs


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    found, step = [], 1
    for size in reversed(shape):
        found.append(step)
        step *= size
    return tuple(reversed(found))
