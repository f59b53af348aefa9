"""Initialises parameters and buffers that are on meta, by the model's own means, as its constructor would.

A model with `_init_weights(module)` (as in Hugging Face) fills module by module from the leaves up, which is how it fills itself;
a parent module may fill its children once more. Otherwise, and for what that leaves out, `reset_parameters` of the module fills
it. Buffers that depend on a `config` alone are made by constructing their module again. Every tensor starts with a marker value,
so a tensor that nothing filled is found and raises an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from scrimp.errors import RunError

Fill: TypeAlias = Callable[[nn.Module], Any]
Made: TypeAlias = dict[str, torch.Tensor]


def fill(model: nn.Module, made: dict[str, Made]) -> None:
    """`made`: by module and attribute, new tensors that are already in the model. Everything else that must not change is on
    meta, where filling does nothing."""
    above = {path.rsplit(".", k)[0] for path in made if path for k in range(path.count(".") + 1)} | {""}
    for tensors in made.values():
        for tensor in tensors.values():
            _mark(tensor)
    with torch.no_grad():
        for path, module, init in _from_leaves(model, "", None):
            if init is not None and path in above:
                init(module)
            elif init is None and path in made:
                _reset(module, made[path])
        for path, tensors in made.items():
            _rest(model.get_submodule(path), path, tensors)


def _from_leaves(module: nn.Module, path: str, init: Fill | None) -> Iterator[tuple[str, nn.Module, Fill | None]]:
    """Children before their parents, each with the nearest `_init_weights` around it."""
    init = _own_init(module) or init
    for name, child in module.named_children():
        yield from _from_leaves(child, f"{path}.{name}" if path else name, init)
    yield path, module, init


def _own_init(module: nn.Module) -> Fill | None:
    init = getattr(module, "_init_weights", None)
    if not callable(init):
        return None
    try:
        inspect.signature(init).bind(module)
    except TypeError:
        return None  # another function of that name, which does not take a module
    return init  # type: ignore[no-any-return]


def _reset(module: nn.Module, tensors: Made) -> None:
    """Calls `reset_parameters`, but preserves tensors that are already filled."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is None:
        return
    kept = [(tensor, tensor.clone()) for tensor in tensors.values() if _filled(tensor)]
    reset()
    for tensor, values in kept:
        tensor.copy_(values)


def _rest(module: nn.Module, path: str, tensors: Made) -> None:
    for attempt in (_reset, _rebuild):
        if all(_filled(tensor) for tensor in tensors.values()):
            return
        attempt(module, tensors)
    empty = [f"{path}.{name}" if path else name for name, tensor in tensors.items() if not _filled(tensor)]
    if empty:
        raise RunError(
            f"{', '.join(empty)} of {type(module).__name__} are on meta, and nothing fills them: the module has no "
            "reset_parameters that does, nor the model an _init_weights(module). Give weights that hold them, give the module "
            "a reset_parameters, or build the model on the CPU"
        )


def _rebuild(module: nn.Module, tensors: Made) -> None:
    """Fills buffers of a module whose constructor takes only a config."""
    config = getattr(module, "config", None)
    names = [name for name, tensor in tensors.items() if not _filled(tensor)]
    needs = {*inspect.signature(type(module).__init__).parameters} - {"self", "device"}
    if config is None or needs != {"config"} or any(name not in module._buffers for name in names):
        return
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        again = type(module)(config)
    for name in names:
        values = again._buffers.get(name)
        if values is not None and values.shape == tensors[name].shape:
            tensors[name].copy_(values)


def _mark(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(_odd(tensor.dtype))
    tensor._scrimp_version = tensor._version  # type: ignore[attr-defined]


def _filled(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.bool:  # has no spare value for a marker, so any write counts
        return tensor._version != tensor._scrimp_version  # type: ignore[no-any-return, attr-defined]
    unfilled = tensor.isnan() if tensor.is_floating_point() or tensor.is_complex() else tensor == _odd(tensor.dtype)
    return not bool(unfilled.any())


def _odd(dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return info.min if info.min < 0 else info.max
