"""Runs lowered steps one by one: the oracle of the generated source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from scrimp.lower.comm import Communicator
from scrimp.lower.model import Lowered, LoweredLayer
from scrimp.lower.moves import local_shape, redistribute
from scrimp.lower.steps import Accumulate, Buffer, Call, Fetch, Free, Gather, Move, Offload, Reduce, Step, Store
from scrimp.planner import Placed
from scrimp.rules import localize

Slots = dict[int, torch.Tensor]


class Weights(Protocol):
    """The model's data on this rank, by the model's names."""

    def gather(self, name: str) -> torch.Tensor: ...

    def accumulate(self, name: str, gradient: torch.Tensor, place: Placed, *, donate: bool) -> None: ...

    def buffer(self, name: str) -> torch.Tensor: ...

    def store(self, name: str, new: torch.Tensor) -> None: ...

    def offload(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor: ...


class Interpreter:
    """`seed`: of this step's random numbers. `before` is called with every step, before it runs."""

    def __init__(self, lowered: Lowered, comm: Communicator, weights: Weights, *, seed: int = 0) -> None:
        self.lowered, self.comm, self.weights, self.seed = lowered, comm, weights, seed
        self.before: Callable[[LoweredLayer, Step], None] | None = None
        self._members: dict[tuple[int, int, int], Callable[..., tuple[Any, ...]]] = {}

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Forward and backward on this rank's part of the batch; the loss is complete."""
        lowered = self.lowered
        left = _readers(lowered)
        env: dict[tuple[int | None, str], torch.Tensor] = {(None, name): tensor for name, tensor in batch.items()}
        saved: list[Slots] = []
        loss: torch.Tensor | None = None
        with torch.no_grad():
            for k, layer in enumerate(lowered.layers):
                slots = {}
                for (_, source), (_, slot) in zip(layer.sources, layer.ahead.inputs, strict=True):
                    key = (source.layer, source.name)
                    left[key] -= 1
                    slots[slot] = env[key] if left[key] or source.layer is None else env.pop(key)
                self._run(k, layer, layer.ahead.steps, slots)
                for name, slot in layer.ahead.outputs:
                    if (k, name) == (lowered.loss.layer, lowered.loss.name):
                        place = layer.ahead.slots[slot].place
                        loss = (
                            redistribute(self.comm, slots[slot], place, place.complete(), donate=False)
                            if place.partial
                            else slots[slot]
                        )
                    if left.get((k, name)):
                        env[k, name] = slots[slot]
                saved.append({slot: slots[slot] for slot in layer.ahead.saved})
                slots.clear()
            assert loss is not None
            arrived: dict[tuple[int | None, str], torch.Tensor] = {(lowered.loss.layer, lowered.loss.name): torch.ones_like(loss)}
            env.clear()
            for k in reversed(range(len(lowered.layers))):
                layer = lowered.layers[k]
                slots = saved.pop()
                places = dict(layer.arrives)
                for output, slot in layer.behind.tangents:
                    found = arrived.pop((k, output), None)
                    slots[slot] = self._zeros(layer, slot, places[output]) if found is None else found
                    del found
                self._run(k, layer, layer.behind.steps, slots)
                sources = dict(layer.sources)
                for name, slot in layer.behind.gradients:
                    source = sources[name]
                    if source.layer is not None:
                        self._arrive(arrived, (source.layer, source.name), slots[slot], layer.behind.slots[slot].place)
                slots.clear()
        return loss

    def _arrive(self, arrived: dict[Any, torch.Tensor], key: tuple[int, str], gradient: torch.Tensor, place: Placed) -> None:
        """Gradients of a value that several layers read are summed in the placement of the first."""
        wanted = dict(self.lowered.layers[key[0]].arrives).get(key[1])
        if wanted is None:
            return
        if key not in arrived:
            arrived[key] = gradient
            return
        if place != wanted:
            if wanted.partial:  # complete both: a sum of partial sums and of complete ones is neither
                raise NotImplementedError("gradients in different placements of partial sums")
            gradient = redistribute(self.comm, gradient, place, wanted, donate=False)
        arrived[key] = arrived[key] + gradient

    def _zeros(self, layer: LoweredLayer, slot: int, place: Placed) -> torch.Tensor:
        value = layer.chosen.values[layer.behind.slots[slot].value]
        return torch.zeros(local_shape(place, self.comm.mesh), dtype=getattr(torch, value.dtype))

    def _run(self, k: int, layer: LoweredLayer, steps: tuple[Step, ...], slots: Slots) -> None:
        values, names = layer.chosen.values, layer.names
        for step in steps:
            if self.before is not None:
                self.before(layer, step)
            match step:
                case Call():
                    made = self._member(k, layer, step.op)(*(slots[slot] for slot in step.inputs))
                    for slot, tensor in zip(step.outputs, made, strict=False):
                        if slot is not None:
                            slots[slot] = tensor
                    del made
                    tensor = None
                case Move():
                    order = values[step.value].order
                    source = slots.pop(step.source) if step.donate else slots[step.source]
                    slots[step.target] = redistribute(self.comm, source, step.before, step.after, order, donate=step.donate)
                    del source
                case Reduce():
                    order = values[step.value].order
                    complete = step.before.complete()
                    slots[step.slot] = redistribute(self.comm, slots.pop(step.slot), step.before, complete, order, donate=True)
                case Gather():
                    slots[step.target] = self.weights.gather(names[step.weight])
                case Buffer():
                    slots[step.target] = self.weights.buffer(names[step.buffer])
                case Accumulate():
                    source = slots.pop(step.source) if step.donate else slots[step.source]
                    self.weights.accumulate(names[step.weight], source, step.before, donate=step.donate)
                    del source
                case Store():
                    whole = Placed(tuple(((_size(dim), ()),) for dim in step.before.dims))
                    new = slots[step.source]
                    if step.before != whole:
                        new = redistribute(self.comm, new, step.before, whole, donate=False)
                    self.weights.store(names[step.buffer], new)
                    del new
                case Offload():
                    slots[step.target] = self.weights.offload(slots[step.source])
                case Fetch():
                    slots[step.target] = self.weights.fetch(slots[step.source])
                case Free():
                    for slot in step.slots:
                        slots.pop(slot, None)

    def _member(self, k: int, layer: LoweredLayer, index: int) -> Callable[..., tuple[Any, ...]]:
        key = (id(layer.chosen), index, k)
        if key not in self._members:
            chosen = layer.chosen.ops[index]

            def draw(coordinates: tuple[tuple[str, int], ...]) -> torch.Generator:
                return torch.Generator().manual_seed(hash((self.seed, k, index, coordinates)) & (2**63 - 1))

            self._members[key] = localize(
                chosen.op, chosen.rule, dict(chosen.split), self.comm.mesh, self.comm.rank,
                all_reduce=self.comm.all_reduce, draw=draw,
            )  # fmt: skip
        return self._members[key]


def _size(dim: tuple[tuple[int, tuple[str, ...]], ...]) -> int:
    found = 1
    for size, _ in dim:
        found *= size
    return found


def _readers(lowered: Lowered) -> dict[tuple[int | None, str], int]:
    found: dict[tuple[int | None, str], int] = {}
    for layer in lowered.layers:
        for _, source in layer.sources:
            found[source.layer, source.name] = found.get((source.layer, source.name), 0) + 1
    return found
