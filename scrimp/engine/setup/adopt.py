"""Adopts a model: builds the chunk table and moves all parameters into the store, with at most one layer in memory twice.

A parameter that has values (or is given some) is moved tensor by tensor. Parameters on meta are initialised layer by layer. A
parameter that was moved becomes an empty parameter on meta: its memory is free, and initialising another layer cannot touch it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from scrimp.chunks import ChunkTable, Row, Slot, Store, build_table
from scrimp.engine.setup.empty_parameter import EmptyParameter, emptied
from scrimp.engine.setup.materialize import Made, fill
from scrimp.engine.setup.parameter_references import Set, references
from scrimp.engine.setup.state_dict_names import Match, persistent_buffers
from scrimp.engine.setup.weight_sources import Source, open_weights
from scrimp.engine.step.parameter_hooks import Hooks
from scrimp.errors import RunError
from scrimp.layers import Layer

DEFAULT_CHUNK = 32 << 20


def table_of(model: nn.Module, layers: tuple[Layer, ...], chunk_numel: int, world: int, *, wide: bool) -> ChunkTable:
    """`wide`: parameters of modules with running statistics stay fp32, as the statistics do."""
    parameters = dict(model.named_parameters())
    fp32_names = {name for name in parameters if wide and _keeps_statistics(model.get_submodule(name.rpartition(".")[0]))}
    rows = []
    for layer in layers:
        rows.append((layer.path, [_row(name, parameters[name], name in fp32_names) for name in layer.parameters], layer.shared))
    return build_table(rows, capacity=chunk_numel, world=world)


def _keeps_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def _row(name: str, parameter: nn.Parameter, wide: bool) -> Row:
    if not parameter.is_floating_point():
        raise RunError(f"parameter {name} is {parameter.dtype}; the engine trains and keeps floating-point parameters only")
    return Row(name=name, shape=tuple(parameter.shape), trainable=parameter.requires_grad, wide=wide)


@dataclass(kw_only=True)
class EmptiedParameter:
    """A parameter and its places in the module tree: several if it is tied. `original` is the user's object."""

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
    """By the id of each new Parameter: its layer and slot, the empty parameter that replaces it between steps, and setters for
    other references to it."""

    places: dict[int, tuple[int, Slot]]
    meta_parameters: dict[int, EmptyParameter]
    references: dict[int, list[Set]]


def adopt(model: nn.Module, store: Store, weights: Source | None = None, *, hooks: Hooks, room_nbytes: int = 0) -> Taken:
    """Move every parameter into the store. Its values come from `weights` if given, else from the parameter, else from the
    model's own initialisation. Rank 0's values count, but every rank must be able to read the weights. All buffers have values
    afterwards. Initialisation runs on the device if a layer takes less than `room_nbytes` there: random numbers are faster there,
    and differ from the host's."""
    given = None if weights is None else Match(model, open_weights(weights))
    values = None if store.outside else given  # a rank that does not train keeps none
    layers = _entries(model, store, hooks)
    unmade = [[entry for entry in entries if _needs_values(store, given, entry)] for entries in layers]
    for index, (entries, left) in enumerate(zip(layers, unmade, strict=True)):
        there = [entry for entry in entries if entry not in left]
        with store.opened(index, write=True) if there else nullcontext():  # one read and write per layer, if it is on disk
            _adopt(store, there, (e.parameter if values is None else values.read_parameter(e.slot.name) for e in there))
    for index, left in enumerate(unmade):
        if left:
            with store.opened(index, write=True):
                fits = 2 * sum(entry.parameter.nbytes for entry in left) <= room_nbytes
                _make(model, store, left, store.device if fits else torch.device("cpu"))
    _make_buffers(model, given)
    taken = Taken(places={}, meta_parameters={}, references={})
    for index, entries in enumerate(layers):
        storage = store.flats[index].untyped_storage()
        if not store.resident[index]:
            storage.resize_(store.nbytes(index))  # a view needs allocated storage
        for entry in entries:
            empty = entry.original
            assert isinstance(empty, EmptyParameter)
            weight = entry.put(_view(store, index, entry))
            vars(weight).update(vars(empty))  # attributes that the user set on it
            entry.hooks(weight)
            taken.places[id(weight)], taken.meta_parameters[id(weight)] = (index, entry.slot), empty
            taken.references[id(weight)] = entry.references
        if not store.resident[index]:
            storage.resize_(0)
    return taken


def _needs_values(store: Store, given: Match | None, entry: EmptiedParameter) -> bool:
    return given is None and entry.parameter.is_meta and not store.outside


def _view(store: Store, index: int, entry: EmptiedParameter) -> torch.Tensor:
    """A view of the layer's device storage. Under a plan, which splits parameters: a whole tensor whose storage is empty, until a
    forward of the model itself gathers it."""
    if store.tiling is None:
        return store.device_view(index, entry.slot)
    whole = torch.empty(store.tiling.shape(entry.slot.name), dtype=store.dtype_of(index), device=store.device)
    whole.untyped_storage().resize_(0)
    return whole


def _entries(model: nn.Module, store: Store, hooks: Hooks) -> list[list[EmptiedParameter]]:
    """Entries by layer."""

    def entry(layer: int, slot: Slot) -> EmptiedParameter:
        original = model.get_parameter(slot.name)
        return EmptiedParameter(
            layer=layer,
            slot=slot,
            places=tuple(places[id(original)]),
            original=original,
            references=held.get(id(original), []),
            hooks=hooks.adopt(original, slot.name),
        )

    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, attribute))
    held = references(model, {*places})
    return [[entry(k, slot) for slot in layer.slots] for k, layer in enumerate(store.table.layers)]


def _adopt(store: Store, entries: list[EmptiedParameter], values: Iterable[torch.Tensor]) -> None:
    """`values`: of each entry on this rank."""
    for entry, first in zip(entries, store.ranks.each_from_first(each.detach() for each in values), strict=True):
        store.adopt(entry.layer, entry.slot, first)
        entry.original = emptied(entry.original, entry.slot.name, store.dtype_of(entry.layer))
        entry.place(entry.original)


def _make(model: nn.Module, store: Store, entries: list[EmptiedParameter], device: torch.device) -> None:
    """Initialise a layer's parameters that are on meta, and the buffers of their modules."""
    made: dict[str, Made] = {}
    for entry in entries:
        path, _, attribute = entry.slot.name.rpartition(".")
        made.setdefault(path, {})[attribute] = entry.put(torch.empty_like(entry.parameter, device=device))
    for path, tensors in made.items():
        tensors.update(_buffers_off_meta(model.get_submodule(path), device))
    if made:
        fill(model, made)
    _adopt(store, entries, (entry.parameter for entry in entries))


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
    if given is not None:  # last, because filling a module's other buffers may have overwritten these
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
    """Move all buffers to the device, where they stay; returns their bytes."""
    nbytes = 0
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
                nbytes += buffer.nbytes
    return nbytes
