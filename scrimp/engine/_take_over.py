"""Taking over a model: layers found, chunk table built, parameters moved into the arenas one by one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from scrimp.chunks._store import Store
from scrimp.chunks._table import ChunkTable, Row, Slot, build_table
from scrimp.errors import RunError
from scrimp.layers import Layer

DEFAULT_CHUNK = 32 << 20


def table_of(model: nn.Module, layers: tuple[Layer, ...], chunk_numel: int, world: int, *, wide: bool) -> ChunkTable:
    """`wide`: parameters beside running statistics stay fp32, as their statistics do."""
    parameters = dict(model.named_parameters())
    beside = {name for name in parameters if wide and _keeps_statistics(model.get_submodule(name.rpartition(".")[0]))}
    rows = []
    for layer in layers:
        rows.append((layer.path, [_row(name, parameters[name], name in beside) for name in layer.parameters], layer.shared))
    return build_table(rows, capacity=chunk_numel, world=world)


def _keeps_statistics(module: nn.Module) -> bool:
    return getattr(module, "running_mean", None) is not None


def _row(name: str, parameter: nn.Parameter, wide: bool) -> Row:
    if not parameter.is_floating_point():
        raise RunError(f"parameter {name} is {parameter.dtype}; the engine trains and keeps floating-point parameters only")
    return Row(name=name, shape=tuple(parameter.shape), trainable=parameter.requires_grad, wide=wide)


def take_over(model: nn.Module, store: Store) -> dict[int, tuple[int, Slot]]:
    """Move every parameter into the store; what was on meta is made by its module's reset_parameters, module by module.
    For each new Parameter, by id, its layer and slot."""
    places: dict[int, tuple[int, Slot]] = {}
    for index, layer in enumerate(store.table.layers):
        slots = {slot.name: slot for slot in layer.slots}
        storage = store.flats[index].untyped_storage()
        storage.resize_(store.nbytes(index))  # views can only be made of what is there
        with store.opened(index, write=True):
            for owner, names in _owners(model, slots):
                _materialise(model, owner, names)
                for name, attribute in names:
                    old = owner._parameters[attribute]
                    assert old is not None
                    store.adopt(index, slots[name], store.wire.from_first(old.detach()))
                    new = nn.Parameter(store.device_view(index, slots[name]), requires_grad=slots[name].trainable)
                    _replace(model, old, new)
                    places[id(new)] = (index, slots[name])
        storage.resize_(0)
    return places


def _replace(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a new Parameter wherever the old one stands in the module tree: tied weights stay tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def _owners(model: nn.Module, slots: dict[str, Slot]) -> Iterator[tuple[nn.Module, list[tuple[str, str]]]]:
    """Modules with direct parameters among the slots: (module, [(full name, attribute)])."""
    by_module: dict[str, list[tuple[str, str]]] = {}
    for name in slots:
        path, _, attribute = name.rpartition(".")
        by_module.setdefault(path, []).append((name, attribute))
    for path, names in by_module.items():
        yield model.get_submodule(path), names


def _materialise(model: nn.Module, module: nn.Module, names: list[tuple[str, str]]) -> None:
    if not any(module._parameters[attribute].is_meta for _, attribute in names):  # type: ignore[union-attr]
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None:
        raise RunError(
            f"{[name for name, _ in names]} are on meta and their module {type(module).__name__} has no reset_parameters; "
            "build the model on the CPU, or give the module one"
        )
    # Not Module.to_empty, which would make two of a parameter that is tied to another module's.
    for parameter in list(module._parameters.values()):
        if parameter is not None and parameter.is_meta:
            made = nn.Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
            _replace(model, parameter, made)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    with torch.no_grad():
        reset()


def buffers_to(model: nn.Module, device: torch.device) -> int:
    """Buffers live on the device for good; their bytes."""
    nbytes = 0
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise RunError(
                    f"buffer {name} of {type(module).__name__} is on meta; compute it in reset_parameters or build on the CPU"
                )
            module._buffers[name] = buffer.to(device)
            nbytes += module._buffers[name].nbytes  # type: ignore[union-attr]
    return nbytes
