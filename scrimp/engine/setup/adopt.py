"""Taking over a model: chunk table built, parameters moved into the arenas, never more than a layer of them twice.

What has values (or is given some) is adopted tensor by tensor. What is on meta is made layer by layer. A parameter that
was adopted becomes a stand-in on meta: its memory is free, and nothing that fills one layer can touch another.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from scrimp.chunks import ChunkTable, Row, Slot, Store, build_table
from scrimp.engine.setup.empty_parameter import StandIn, stand_in_for
from scrimp.engine.setup.materialize import Made, fill
from scrimp.engine.setup.parameter_references import Set, references
from scrimp.engine.setup.state_dict_names import Match, persistent_buffers
from scrimp.engine.setup.weight_sources import Source, open_weights
from scrimp.engine.step.parameter_hooks import Hooks
from scrimp.errors import RunError
from scrimp.layers import Layer

DEFAULT_CHUNK = 32 << 20


def table_of(model: nn.Module, layers: tuple[Layer, ...], chunk_numel: int, world: int, *, wide: bool) -> ChunkTable:
    """`wide`: parameters beside running statistics stay fp32, as their statistics do."""
    parameters = dict(model.named_parameters())
    overlapped = {name for name in parameters if wide and _keeps_statistics(model.get_submodule(name.rpartition(".")[0]))}
    rows = []
    for layer in layers:
        rows.append((layer.path, [_row(name, parameters[name], name in overlapped) for name in layer.parameters], layer.shared))
    return build_table(rows, capacity=chunk_numel, world=world)


def _keeps_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def _row(name: str, parameter: nn.Parameter, wide: bool) -> Row:
    if not parameter.is_floating_point():
        raise RunError(f"parameter {name} is {parameter.dtype}; the engine trains and keeps floating-point parameters only")
    return Row(name=name, shape=tuple(parameter.shape), trainable=parameter.requires_grad, wide=wide)


@dataclass(kw_only=True)
class EmptiedParameter:
    """A parameter's places in the module tree: several if it is tied. `original` is the user's object."""

    layer: int
    slot: Slot
    places: tuple[tuple[nn.Module, str], ...]
    original: nn.Parameter
    references: list[Set]
    hooks: Callable[[nn.Parameter], None]

    @property
    def parameter(self) -> nn.Parameter:
        module, attribute = self.places[0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter

    def put(self, values: torch.Tensor) -> nn.Parameter:
        """A new parameter with these values."""
        parameter = nn.Parameter(values, requires_grad=self.slot.trainable)
        self.place(parameter)
        return parameter

    def place(self, parameter: nn.Parameter) -> None:
        for module, attribute in self.places:
            module._parameters[attribute] = parameter
        for put in self.references:
            put(parameter)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """By the id of each new Parameter: its layer and slot, the object that stands in for it between steps, and what puts another
    object where modules refer to it."""

    places: dict[int, tuple[int, Slot]]
    meta_parameters: dict[int, StandIn]
    references: dict[int, list[Set]]


def take_over(model: nn.Module, store: Store, weights: Source | None = None, *, hooks: Hooks, room_nbytes: int = 0) -> Taken:
    """Move every parameter into the store, with the values of `weights` if they are given, else its own, else those that
    its model makes; rank 0's count, and every rank must find the weights. All buffers have values then, too. What a model
    makes is made on the device, if a layer takes less than `room_nbytes` of it: that is where random numbers are quick, and
    others than the host's."""
    given = None if weights is None else Match(model, open_weights(weights))
    layers = _seats(model, store, hooks)
    unmade = [[seat for seat in seats if given is None and seat.parameter.is_meta] for seats in layers]
    for index, (seats, left) in enumerate(zip(layers, unmade, strict=True)):
        there = [seat for seat in seats if seat not in left]
        with store.opened(index, write=True) if there else nullcontext():  # once for all of them, if it is on disk
            for seat in there:
                _adopt(store, seat, seat.parameter if given is None else given.read_parameter(seat.slot.name))
    for index, left in enumerate(unmade):
        if left:
            with store.opened(index, write=True):
                fits = 2 * sum(seat.parameter.nbytes for seat in left) <= room_nbytes
                _make(model, store, left, store.device if fits else torch.device("cpu"))
    _make_buffers(model, given)
    taken = Taken(places={}, meta_parameters={}, references={})
    for index, seats in enumerate(layers):
        storage = store.flats[index].untyped_storage()
        if not store.resident[index]:
            storage.resize_(store.nbytes(index))  # views can only be made of what is there
        for seat in seats:
            stand_in = seat.original
            assert isinstance(stand_in, StandIn)
            weight = seat.put(store.device_view(index, seat.slot))
            vars(weight).update(vars(stand_in))  # what the user has written on it
            seat.hooks(weight)
            taken.places[id(weight)], taken.meta_parameters[id(weight)] = (index, seat.slot), stand_in
            taken.references[id(weight)] = seat.references
        if not store.resident[index]:
            storage.resize_(0)
    return taken


def _seats(model: nn.Module, store: Store, hooks: Hooks) -> list[list[EmptiedParameter]]:
    """By layer."""

    def seat(layer: int, slot: Slot) -> EmptiedParameter:
        original = model.get_parameter(slot.name)
        return EmptiedParameter(
            layer=layer,
            slot=slot,
            places=tuple(places[id(original)]),
            original=original,
            references=held.get(id(original), []),
            hooks=hooks.take_over(original, slot.name),
        )

    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, attribute))
    held = references(model, {*places})
    return [[seat(k, slot) for slot in layer.slots] for k, layer in enumerate(store.table.layers)]


def _adopt(store: Store, seat: EmptiedParameter, values: torch.Tensor) -> None:
    store.adopt(seat.layer, seat.slot, store.ranks.from_first(values.detach()))
    seat.original = stand_in_for(seat.original, seat.slot.name, store.dtype_of(seat.layer))
    seat.place(seat.original)


def _make(model: nn.Module, store: Store, seats: list[EmptiedParameter], device: torch.device) -> None:
    """A layer's parameters that are on meta, and their modules' buffers."""
    made: dict[str, Made] = {}
    for seat in seats:
        path, _, attribute = seat.slot.name.rpartition(".")
        made.setdefault(path, {})[attribute] = seat.put(torch.empty_like(seat.parameter, device=device))
    for path, tensors in made.items():
        tensors.update(_buffers_off_meta(model.get_submodule(path), device))
    if made:
        fill(model, made)
    for seat in seats:
        _adopt(store, seat, seat.parameter)


def _make_buffers(model: nn.Module, given: Match | None) -> None:
    if given is not None:
        for _, module, attribute, buffer in persistent_buffers(model):
            if buffer.is_meta:
                module._buffers[attribute] = torch.empty_like(buffer, device="cpu")
    made = {
        path: tensors for path, module in model.named_modules() if (tensors := _buffers_off_meta(module, torch.device("cpu")))
    }
    if made:
        fill(model, made)
    if given is not None:  # last: what fills a module's other buffers may have written to these
        for name, _, _, buffer in persistent_buffers(model):
            if name in given:
                buffer.copy_(given.read(name))


def _buffers_off_meta(module: nn.Module, device: torch.device) -> Made:
    made: Made = {}
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = made[name] = torch.empty_like(buffer, device=device)
    return made


def buffers_to(model: nn.Module, device: torch.device) -> int:
    """Buffers live on the device for good; their bytes."""
    nbytes = 0
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
                nbytes += buffer.nbytes
    return nbytes
