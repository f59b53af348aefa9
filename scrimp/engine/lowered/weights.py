"""The model's data as a lowered program uses it: weights come from the store, gradients go to the exchange.

A layer's weights are brought to the device before its forward and before its backward (`Residents.touch`). In 16 bits a gradient
overwrites its weight. So it waits until nothing of this backward reads the weight any more: until the layer's end, or, for a
weight that several layers use, for the last of them.

Where states are sharded further than weights (ZeRO 1 and 2), each rank updates its share. The other shares of the weight are
gathered before the weight's next use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from scrimp.chunks import Slot, Store
from scrimp.engine.lowered.program import Part
from scrimp.engine.step.input_offload import on_host
from scrimp.engine.step.residency import Residents
from scrimp.lower import (
    Buckets,
    Overlap,
    Ranks,
    Rest,
    Summed,
    Together,
    buckets_of,
    chunks,
    gathered,
    later_axes,
    made_whole,
    overlap_of,
    shared_together,
    summed_together,
)
from scrimp.planner import Placed

Receive = Callable[[int, Slot, torch.Tensor], None]
LEAST_NBYTES = 1 << 16  # that a gather of a part of a weight takes: many small moves would take longer than their bytes are worth


class EngineWeights:
    """`receive(layer, slot, gradient)` takes a gradient of a micro-batch. `at`: the place of each layer in the store's table."""

    gain = 1  # the factor of the loss whose gradients come here

    def __init__(
        self,
        lowered: Part,
        comm: Ranks,
        store: Store,
        residents: Residents,
        model: nn.Module,
        receive: Receive,
        at: tuple[int, ...],
    ) -> None:
        self.lowered, self.comm, self._data, self.residents = lowered, comm, store, residents
        self._model = model
        self._buffers: dict[str, torch.Tensor] = {}
        self.places = {slot.name: (k, slot) for k, layer in enumerate(store.table.layers) for slot in layer.slots}
        self._number = {name: k for k, name in enumerate(self.places)}
        self.updates = 0  # of the weights, so far
        self._receive, self._at = receive, at
        later = later_axes(lowered.pieces, accumulated=store.micro_batches > 1)
        self._later = {name: axes for name, axes in later.items() if self._own(name)}
        buckets = self._buckets()
        self._room_nbytes = buckets.room_nbytes
        self._together = Together(buckets, self._overlap(buckets), lowered.rest, comm, self._later, self._share)
        self._fresh: dict[int, tuple[int, int]] = {}  # by layer: the update and the fetch after which all shares were gathered
        self._waiting: dict[str, torch.Tensor] = {}  # gradients whose weights are still read, or of which more summands come
        self._seen: dict[str, int] = {}  # summands of this backward, so far
        self._here: list[str] = []  # gradients of the layer that runs
        self._layer = 0
        self._stale = [self._updated_elsewhere(layer) for layer in range(len(store.table.layers))]

    def _buckets(self) -> Buckets:
        return buckets_of(self.lowered.pieces[0], self._later)

    def _overlap(self, buckets: Buckets) -> Overlap:
        return overlap_of(self.lowered.pieces[0], buckets, self._later)

    @property
    def rest(self) -> Mapping[str, Rest]:
        return self.lowered.rest

    # A layer's pass.

    def enter(self, layer: int, *, backward: bool) -> None:
        self._layer = layer
        self.residents.touch(self._at[layer])
        self._together.enter(layer, backward=backward)
        for other in self._data.table.layers[self._at[layer]].needs:
            self._refresh(other, self._together.room_nbytes)

    def leave(self, layer: int, *, backward: bool) -> None:
        self._take(self._together.leave())
        for name in self._here:
            if self._complete(name):
                if name in self._waiting:
                    self._deliver(name)
                self.residents.arrived(*self.places[name])
        self._here.clear()

    def begin(self) -> None:
        """Before a micro-batch."""
        self._together.settle()
        # Else a layer's shares are here only while it runs, and its gradients must be, before its buffer is given away.
        self._together.across = all(map(self._data.anchored, range(len(self._data.table.layers))))
        self.comm.turn = 0
        self._buffers = dict(self._model.named_buffers())
        self._waiting.clear()
        self._seen.clear()
        self._here.clear()

    # Weights.

    def gather(self, name: str) -> torch.Tensor:
        self.comm.note(self._number[name])
        return self._together.gather(name)

    def _share(self, name: str) -> torch.Tensor:
        """Perhaps of a layer that does not run yet, and whose last update still does."""
        layer, slot = self.places[name]
        self._data.arrived(layer)
        return self._data.device_view(layer, slot)

    def whole(self, name: str) -> torch.Tensor:
        """For a forward of the model itself: all of a weight, which every rank gathers."""
        layer, _ = self.places[name]
        self.residents.touch(layer)
        self._refresh(layer, 0)
        tile = gathered(self.comm, self._share(name), self.rest[name], self.rest[name].weight)
        return made_whole(self.comm, tile, self.rest[name].use)

    def _refresh(self, layer: int, room_nbytes: int) -> None:
        """Gathers the shares of a layer's weights that other ranks have updated: several in one move if there is room, a weight
        in several moves if there is room for a part of it only."""
        stale, now = self._stale[layer], (self.updates, self._data.fetches[layer])
        if not stale or not self.updates or self._fresh.get(layer) == now:
            return
        with self.residents.quietly():
            for (states, axes), slots in stale.items():
                views = [self._data.device_view(layer, slot) for slot in slots]
                mine = [view[slice(*_updated(slot))] for view, slot in zip(views, slots, strict=True)]
                # Of each element of a share, in all: the copies that are sent, and the one array in which all shares arrive.
                each = [2 * view.nbytes // share.numel() for view, share in zip(views, mine, strict=True)]
                parts = [
                    (k, first, min(first + most, share.numel()))
                    for k, share in enumerate(mine)
                    for most in [max(1, max(room_nbytes, LEAST_NBYTES) // each[k]) if room_nbytes else share.numel()]
                    for first in range(0, share.numel(), most)
                ]
                for chunk in chunks([each[k] * (stop - first) for k, first, stop in parts], room_nbytes):
                    moved = [parts[number] for number in chunk]
                    self.comm.note(self._number[slots[moved[0][0]].name])
                    rows = shared_together(self.comm, [mine[k][first:stop] for k, first, stop in moved], states, axes)
                    for (k, first, stop), whole in zip(moved, rows, strict=True):
                        views[k].view(whole.shape[0], -1)[:, first:stop].copy_(whole)
                    del rows, whole  # before the next ones arrive
        self._fresh[layer] = now

    def _updated_elsewhere(self, layer: int) -> dict[tuple[tuple[str, ...], tuple[str, ...]], list[Slot]]:
        """The slots of which other ranks update shares, by the axes of states and of weights."""
        found: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Slot]] = {}
        for slot in self._data.table.layers[layer].slots:
            each = self.rest[slot.name] if slot.held else None
            if slot.trainable and each is not None and each.weight != each.states:
                found.setdefault((each.states, each.weight), []).append(slot)
        return found

    # Gradients.

    def accumulate(self, name: str, gradient: torch.Tensor, place: Placed, *, donate: bool) -> None:
        self.comm.note(self._number[name])
        found = self._sums(name, gradient, place, donate=donate)
        read_on = None if donate else gradient.untyped_storage().data_ptr()
        del gradient
        self._take(found, read_on)

    def _take(self, found: list[Summed], read_on: int | None = None) -> None:
        """`read_on`: the storage of a gradient that other steps still read. A sum that took a move has a storage of its own."""
        while found:
            layer, each, flat = found.pop()
            self._seen[each] = self._seen.get(each, 0) + 1
            self._here.append(each)
            if self._adds_up(each):
                self._receive(*self.places[each], flat)
                continue
            if each in self._waiting:
                self._waiting[each].add_(flat)
            elif not self._complete(each) and flat.untyped_storage().data_ptr() == read_on:
                self._waiting[each] = flat.clone()  # other steps read the gradient, and more summands are added to this one
            else:
                self._waiting[each] = flat
            read = layer == self._layer and each in self.lowered.layers[layer].read_late
            if self._complete(each) and (not read or self._own(each)):
                self._deliver(each)

    def settle(self) -> None:
        """Waits for the moves that a failed step left on their way, and frees what they hold."""
        self._together.settle()

    def _sums(self, name: str, gradient: torch.Tensor, place: Placed, *, donate: bool) -> list[Summed]:
        """Takes a gradient. Returns those whose sums end now."""
        return self._together.sum(name, gradient, place, donate=donate)

    def _adds_up(self, name: str) -> bool:
        """Whether the summands of a weight that several layers use are added where gradients are accumulated."""
        return self._own(name)

    def _complete(self, name: str) -> bool:
        return self._seen[name] == len(self.lowered.partials[name])

    def later(self, name: str) -> tuple[str, ...]:
        """The axes along which this rank accumulates its own summands, which `complete` sums over the ranks."""
        return self._later.get(name, ())

    def complete(self, names: Sequence[str]) -> None:
        """The sums over the ranks of what was accumulated, after the last micro-batch: many in one move if there is room."""
        alike: dict[tuple[object, ...], list[str]] = {}
        for name in names:
            each, later = self.rest[name], self.later(name)
            if later:
                alike.setdefault((each.gradient, later, each.states, each.dtype), []).append(name)
                self._data.arrived_on_host(self.places[name][0])
        for group in alike.values():
            each, later = self.rest[group[0]], self.later(group[0])
            sums = [self._accumulated(name) for name in group]
            # What is packed and what arrives: on the host tier also a copy on the device.
            for chunk in chunks([4 * one.nbytes for one in sums], self._room_nbytes):
                name = group[chunk[0]]
                self.comm.note(self._number[name])
                here = [sums[k].to(self._data.device) for k in chunk]
                found = summed_together(self.comm, here, (each.gradient, later), (each.states, ()))
                for k, one in zip(chunk, found, strict=True):
                    share = self.places[group[k]][1].share
                    assert share is not None
                    first = share.updated[0] - share.summed[0]
                    sums[k][first : first + one.numel()].copy_(one.view(-1))
                del found, one

    def _accumulated(self, name: str) -> torch.Tensor:
        layer, slot = self.places[name]
        gradients, share = self._data.placements[layer].gradients, slot.share
        assert gradients is not None
        assert share is not None
        return gradients[share.gradient_start :][: share.summed[1] - share.summed[0]]

    def _own(self, name: str) -> bool:
        """Whether gradients have arenas of their own."""
        return self._data.placements[self.places[name][0]].gradients is not None

    def _deliver(self, name: str) -> None:
        layer, slot = self.places[name]
        self._receive(layer, slot, self._waiting.pop(name))

    # Buffers and activations.

    def buffer(self, name: str) -> torch.Tensor:
        return self._buffers[name]

    def store(self, name: str, new: torch.Tensor) -> None:
        self._buffers[name].copy_(new)

    def offload(self, tensor: torch.Tensor) -> torch.Tensor:
        streams = self._data.copy_streams
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        flat = on_host(self._data, self.residents.meter, tensor, "activations that the plan offloads")
        order = tensor.stride() if span == tensor.numel() else tensor.contiguous().stride()
        there = flat.as_strided(tensor.shape, order)
        streams.wait(streams.down(there, tensor))  # the plan counts its bytes no longer
        self._data.traffic.down_nbytes += tensor.nbytes
        return there

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        streams = self._data.copy_streams
        here = torch.empty_like(tensor, device=self._data.device)  # in the same order, without what lies between rows of a view
        streams.wait(streams.up(here, tensor))
        self._data.traffic.up_nbytes += tensor.nbytes
        return here


def _updated(slot: Slot) -> tuple[int, int]:
    assert slot.share is not None
    return slot.share.updated
