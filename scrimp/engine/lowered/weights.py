"""The model's data as a lowered program uses it: weights come from the store, gradients go to the exchange.

A layer's weights are brought to the device before its forward and before its backward (`Residents.touch`). In 16 bits a gradient
overwrites its weight. So it waits until nothing of this backward reads the weight any more: until the layer's end, or, for a
weight that several layers use, for the last of them.

Where states are sharded further than weights (ZeRO 1 and 2), each rank updates its share. The other shares of the weight are
gathered before the weight's next use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from scrimp.chunks import Slot, Store
from scrimp.engine.lowered.program import Part
from scrimp.engine.step.input_offload import on_host
from scrimp.engine.step.residency import Residents
from scrimp.lower import Communicator, Rest, gathered, later_axes, made_whole, shared, summed
from scrimp.planner import Placed

Receive = Callable[[int, Slot, torch.Tensor], None]


class EngineWeights:
    """`receive(layer, slot, gradient)` takes a gradient of a micro-batch. `at`: the place of each layer in the store's table."""

    def __init__(
        self,
        lowered: Part,
        comm: Communicator,
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
        self.updates = 0  # of the weights, so far
        self._receive, self._at = receive, at
        self._later = later_axes(lowered.pieces, accumulated=store.micro_batches > 1)
        self._fresh: dict[int, tuple[int, int]] = {}  # by layer: the update and the fetch after which all shares were gathered
        self._waiting: dict[str, torch.Tensor] = {}  # gradients whose weights are still read, or of which more summands come
        self._seen: dict[str, int] = {}  # summands of this backward, so far
        self._here: list[str] = []  # gradients of the layer that runs
        self._layer = 0

    @property
    def rest(self) -> Mapping[str, Rest]:
        return self.lowered.rest

    # A layer's pass.

    def enter(self, layer: int, *, backward: bool) -> None:
        self._layer = layer
        self.residents.touch(self._at[layer])
        for other in self._data.table.layers[self._at[layer]].needs:
            self._refresh(other)

    def leave(self, layer: int, *, backward: bool) -> None:
        for name in self._here:
            if self._complete(name):
                if name in self._waiting:
                    self._deliver(name)
                self.residents.arrived(*self.places[name])
        self._here.clear()

    def begin(self) -> None:
        """Before a micro-batch."""
        self._buffers = dict(self._model.named_buffers())
        self._waiting.clear()
        self._seen.clear()
        self._here.clear()

    # Weights.

    def gather(self, name: str) -> torch.Tensor:
        layer, slot = self.places[name]
        return gathered(self.comm, self._data.device_view(layer, slot), self.rest[name], self.rest[name].weight)

    def whole(self, name: str) -> torch.Tensor:
        """For a forward of the model itself: all of a weight, which every rank gathers."""
        layer, _ = self.places[name]
        self.residents.touch(layer)
        self._refresh(layer)
        return made_whole(self.comm, self.gather(name), self.rest[name].use)

    def _refresh(self, layer: int) -> None:
        """Gathers the shares of a layer's weights that other ranks have updated."""
        slots = [slot for slot in self._data.table.layers[layer].slots if slot.trainable and slot.held]
        stale = [slot for slot in slots if self.rest[slot.name].weight != self.rest[slot.name].states]
        now = (self.updates, self._data.fetches[layer])
        if not stale or not self.updates or self._fresh.get(layer) == now:
            return
        with self.residents.quietly():
            for slot in stale:
                assert slot.share is not None
                each, weight = self.rest[slot.name], self._data.device_view(layer, slot)
                mine = weight[slot.share.updated[0] : slot.share.updated[1]]
                weight.copy_(shared(self.comm, mine, each, (each.states, ()), (each.weight, ()), donate=False).view(-1))
        self._fresh[layer] = now

    # Gradients.

    def accumulate(self, name: str, gradient: torch.Tensor, place: Placed, *, donate: bool) -> None:
        each, later = self.rest[name], self.later(name)
        flat = summed(self.comm, gradient, place, each, each.gradient if later else each.states, later=later, donate=donate)
        self._seen[name] = self._seen.get(name, 0) + 1
        self._here.append(name)
        self._waiting[name] = self._waiting[name].add_(flat) if name in self._waiting else flat
        if self._own(name) or (self._complete(name) and name not in self.lowered.layers[self._layer].read_late):
            self._deliver(name)

    def _complete(self, name: str) -> bool:
        return self._seen[name] == len(self.lowered.partials[name])

    def later(self, name: str) -> tuple[str, ...]:
        """The axes along which this rank accumulates its own summands, which `complete` sums over the ranks."""
        return self._later.get(name, ()) if self._own(name) else ()

    def complete(self, name: str) -> None:
        """The sum over the ranks of what was accumulated, after the last micro-batch."""
        each, later, (layer, slot) = self.rest[name], self.later(name), self.places[name]
        if not later:
            return
        assert slot.share is not None
        gradients, share = self._data.placements[layer].gradients, slot.share
        assert gradients is not None
        self._data.arrived_on_host(layer)
        mine = gradients[share.gradient_start :][: share.summed[1] - share.summed[0]]
        here = mine.to(self._data.device)
        found = shared(self.comm, here, each, (each.gradient, later), (each.states, ()), donate=False).view(-1)
        first = share.updated[0] - share.summed[0]
        mine[first : first + found.numel()].copy_(found)

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
        streams, dense = self._data.copy_streams, torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
        flat = on_host(self._data, self.residents.meter, tensor, "activations that the plan offloads")
        order = tensor.stride() if dense.untyped_storage().nbytes() == tensor.nbytes else tensor.contiguous().stride()
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
