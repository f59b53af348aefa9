"""The streamed update: runs on the device, for layers whose master weights and states are on the host.

A layer's weights stay on the device, and its gradients are there too. Tile by tile, masters and states are copied up, updated
and copied down again, through a few staging buffers that take turns, on separate streams. The host does not compute. Who
computes with the layer waits on the device; who reads its states on the host waits for the last copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from scrimp.chunks.store.placement import Opened, Piece, Placement
from scrimp.chunks.tables.table import Slot
from scrimp.chunks.transfer.copy_streams import Event
from scrimp.chunks.transfer.host_arena import register

TILE, STAGES = 16 << 20, 3  # elements; one buffer is copied up, one is updated, one is copied down


@dataclass(frozen=True, kw_only=True)
class Part:
    """A slot's elements [start, stop) of the layer; `count`: its number of updates, this one included."""

    slot: Slot
    count: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Elements [start, stop) of the layer that are streamed together."""

    start: int
    stop: int
    parts: tuple[Part, ...]


def update_tiles(slots: Sequence[Slot], counts: Sequence[int], most: int) -> list[Tile]:
    """Groups neighbouring slots as long as they fit. A large slot is cut at multiples of `most` from its own start, so that
    vector lanes and tails are those of the whole."""
    found: list[Tile] = []
    for slot, count in sorted(zip(slots, counts, strict=True), key=lambda row: row[0].start):
        for start in range(slot.start, slot.stop, most):
            part = Part(slot=slot, count=count, start=start, stop=min(start + most, slot.stop))
            last = found[-1] if found else None
            if last is not None and part.stop - last.start <= most:
                found[-1] = Tile(start=last.start, stop=part.stop, parts=(*last.parts, part))
            else:
                found.append(Tile(start=start, stop=part.stop, parts=(part,)))
    return found


def stages_nbytes(tensors: int, largest_numel: int) -> int:
    return 4 * min(TILE, largest_numel) * STAGES * tensors


def pin(placement: Placement) -> None:
    """Registers masters and states with CUDA, so that their copies overlap with compute."""
    assert placement.master is not None
    for tensor in (placement.master, *placement.states):
        if not tensor.is_pinned():
            register(tensor)


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Events: all but the last tiles of a layer are up; its weights are updated; its masters and states are back on the host."""

    nearly_up: Event
    updated: Event
    placement: Event


class StreamedUpdate:
    """Staging buffers and streams of the update. `tensors`: number of masters and states of a layer, none larger than
    `largest_numel`."""

    def __init__(self, device: torch.device, tensors: int, largest_numel: int) -> None:
        self.tile = min(TILE, largest_numel)
        self.stages = [
            [torch.empty(self.tile, dtype=torch.float32, device=device) for _ in range(tensors)] for _ in range(STAGES)
        ]
        self._free: list[Event] = [None] * STAGES
        self._placement: dict[int, Event] = {}  # by layer: masters and states are back on the host
        self._turn = 0
        self._device = device
        self._streams: list[Any] = [None] * 3
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(3)]  # type: ignore[no-untyped-call]
            for stream in self._streams:  # the buffers may be memory that the current stream still uses
                stream.wait_stream(torch.cuda.current_stream(device))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for stage in self.stages for tensor in stage)

    def update(
        self, layer: int, data: Opened, todo: Sequence[Tile], apply: Callable[[Part, Piece], None], scale: torch.Tensor | None
    ) -> Passed:
        """`apply` updates a piece, on the stream that is then current. The layer's gradients must have arrived. Only `apply`
        uses `scale`."""
        up, work, down = self._streams
        if work is not None and scale is not None:
            scale.record_stream(work)
        come: list[Event] = []
        done: Event = None
        for tile in todo:
            stage, turn = self.stages[self._turn], self._turn
            self._turn = (turn + 1) % STAGES
            here = [tensor[tile.start : tile.stop] for tensor in (data.master, *data.states)]
            there = [tensor[: tile.stop - tile.start] for tensor in stage]
            come.append(_run(up, [self._free[turn], self._placement.get(layer)], partial(_copy, there, here)))
            done = _run(work, [come[-1]], partial(_update, tile, data, there, apply))
            self._free[turn] = _run(down, [done], partial(_copy, here, there))
        self._placement[layer] = self._free[(self._turn - 1) % STAGES]
        return Passed(nearly_up=come[-STAGES] if len(come) >= STAGES else None, updated=done, placement=self._placement[layer])


def _run(stream: Any, after: Sequence[Event], work: Callable[[], None]) -> Event:
    """Runs work on a stream after some events, and returns the event of its end; without streams, runs it now."""
    if stream is None:
        work()
        return None
    for event in after:
        if event is not None:
            stream.wait_event(event)
    with torch.cuda.stream(stream):
        work()
        done: torch.cuda.Event = stream.record_event()
        return done


def _update(tile: Tile, data: Opened, there: list[torch.Tensor], apply: Callable[[Part, Piece], None]) -> None:
    for part in tile.parts:
        apply(part, _piece(part, tile, data, there))


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _piece(part: Part, tile: Tile, data: Opened, there: list[torch.Tensor]) -> Piece:
    weight = data.weights[part.start : part.stop]
    master, *states = [tensor[part.start - tile.start : part.stop - tile.start] for tensor in there]
    inside = slice(part.start - part.slot.start, part.stop - part.slot.start)
    return Piece(inside=inside, weight=weight, gradient=weight, master=master, states=states)
