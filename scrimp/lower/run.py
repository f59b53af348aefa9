"""One training step of a rank: forward through all layers, then backward; `phase` runs the steps of one layer's pass.

A tensor lives as long as somebody will read it: an output until the last layer that reads it has it, a saved slot until its
layer's backward, the gradient of an output until the layer that made the output runs backward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from scrimp.lower.model import Lowered, LoweredLayer
from scrimp.lower.moves import Communicator, local_shape, redistribute
from scrimp.lower.steps import Ahead, Behind
from scrimp.planner import Placed

Slots = dict[int, torch.Tensor]
Key = tuple[int | None, str]


class Weights(Protocol):
    """The model's data on this rank, by the model's names. `enter` comes before a layer's pass, `leave` after it."""

    def enter(self, layer: int, *, backward: bool) -> None: ...

    def leave(self, layer: int, *, backward: bool) -> None: ...

    def gather(self, name: str) -> torch.Tensor: ...

    def accumulate(self, name: str, gradient: torch.Tensor, place: Placed, *, donate: bool) -> None: ...

    def buffer(self, name: str) -> torch.Tensor: ...

    def store(self, name: str, new: torch.Tensor) -> None: ...

    def offload(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor: ...


class Runner:
    """`seed`: of this step's random numbers. `device`: where operators run. `layer`: the index of the layer that runs."""

    def __init__(
        self, lowered: Lowered, comm: Communicator, weights: Weights, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        self.lowered, self.comm, self.weights, self.seed = lowered, comm, weights, seed
        self.device = torch.device(device)
        self.layer = 0

    def phase(self, layer: LoweredLayer, program: Ahead | Behind, slots: Slots) -> None:
        """Runs the steps of a forward or of a backward, from the given slots to those that leave."""
        raise NotImplementedError

    def step(self, batch: Mapping[str, torch.Tensor], *, scale: float = 1.0) -> torch.Tensor:
        """Forward and backward on this rank's part of the batch; the loss is that of the whole batch. `scale`: a factor of all
        gradients."""
        with torch.no_grad():
            saved, left = self.forward({**batch})
            assert self.lowered.loss is not None
            loss = left[self.lowered.loss.layer, self.lowered.loss.name]
            self.backward(saved, {(self.lowered.loss.layer, self.lowered.loss.name): torch.full_like(loss, scale)})
        return loss

    def draw(self, op: int, coordinates: tuple[tuple[str, int], ...]) -> torch.Generator:
        """The generator of an operator's random numbers: one for each tile, the same for its replicas and for a recompute."""
        text = repr((self.seed, self.layer, op, coordinates)).encode()
        device = "cpu" if self.device.type == "meta" else self.device  # meta has no numbers to draw
        return torch.Generator(device).manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big"))

    def forward(
        self, given: dict[str, torch.Tensor], leaving: Collection[Key] = ()
    ) -> tuple[list[Slots], dict[Key, torch.Tensor]]:
        """What the backward reads, by layer; and the loss and the outputs that leave, complete. Empties `given`."""
        left = self._readers()
        out: dict[Key, torch.Tensor] = {}
        made: dict[Key, torch.Tensor] = {(None, name): tensor for name, tensor in given.items()}
        given.clear()
        loss = self.lowered.loss and (self.lowered.loss.layer, self.lowered.loss.name)
        saved: list[Slots] = []
        for k, layer in enumerate(self.lowered.layers):
            self.layer, slots = self.lowered.first + k, {}
            for (_, source), (_, slot) in zip(layer.sources, layer.ahead.inputs, strict=True):
                key = (source.layer, source.name)
                left[key] -= 1
                slots[slot] = made[key] if left[key] else made.pop(key)
            self.weights.enter(self.layer, backward=False)
            self.phase(layer, layer.ahead, slots)
            self.weights.leave(self.layer, backward=False)
            for name, slot in layer.ahead.outputs:
                if (k, name) == loss or (k, name) in leaving:
                    out[k, name] = self._complete(slots[slot], layer.ahead.slots[slot].place)
                if left.get((k, name)):
                    made[k, name] = slots[slot]
            saved.append({slot: slots[slot] for slot in layer.ahead.saved})
            slots.clear()
        return saved, out

    def backward(self, saved: list[Slots], arrived: dict[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """`arrived`: gradients of the loss and of outputs that left. Returns those of inputs from other pieces; empties both."""
        for k in reversed(range(len(self.lowered.layers))):
            layer, slots = self.lowered.layers[k], saved.pop()
            self.layer, places = self.lowered.first + k, dict(layer.arrives)
            for output, slot in layer.behind.tangents:
                if (k, output) in arrived:
                    slots[slot] = arrived.pop((k, output))
                else:
                    slots[slot] = self._zeros(layer, slot, places[output])
            self.weights.enter(self.layer, backward=True)
            self.phase(layer, layer.behind, slots)
            self.weights.leave(self.layer, backward=True)
            sources = dict(layer.sources)
            for name, slot in layer.behind.gradients:
                source = sources[name]
                self._arrive(arrived, (source.layer, source.name), slots[slot], layer.behind.slots[slot].place)
            slots.clear()
        return arrived

    def _arrive(self, arrived: dict[Key, torch.Tensor], key: Key, gradient: torch.Tensor, place: Placed) -> None:
        """Gradients of a value that several layers read are completed and summed, in the placement of the first that arrives."""
        places = self.lowered.gradients if key[0] is None else dict(self.lowered.layers[key[0]].arrives)
        wanted = places.get(key[1])
        if wanted is None:
            return
        if place != wanted:
            gradient = redistribute(self.comm, gradient, place, wanted, donate=False)
        arrived[key] = arrived[key] + gradient if key in arrived else gradient

    def _complete(self, loss: torch.Tensor, place: Placed) -> torch.Tensor:
        return redistribute(self.comm, loss, place, place.complete(), donate=False) if place.partial else loss

    def _zeros(self, layer: LoweredLayer, slot: int, place: Placed) -> torch.Tensor:
        value = layer.chosen.values[layer.behind.slots[slot].value]
        return torch.zeros(local_shape(place, self.comm.mesh), dtype=getattr(torch, value.dtype), device=self.device)

    def _readers(self) -> dict[Key, int]:
        found: dict[Key, int] = {}
        for layer in self.lowered.layers:
            for _, source in layer.sources:
                found[source.layer, source.name] = found.get((source.layer, source.name), 0) + 1
        return found
