"""Finds the layers of a model by repeated structure, never by class names.

Two modules are alike if their trees of parameters have the same names, shapes and dtypes. A module is a layer if it has a sibling
that is alike (a block of a repeated stack), or if nothing below it repeats and it is not a large part of the model. A module
above the layers that owns parameters directly is a layer of just those. Every parameter belongs to the first layer that owns it;
a layer that shares one (tied weights) needs the owner too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn

LARGE_SHARE = 8  # a module with more than this share of the parameters is split into its children


@dataclass(frozen=True, kw_only=True)
class Layer:
    """`path` is the module's name in the tree ('' for the root). `parameters` are names of the parameters it owns,
    `shared` names of those it uses and another layer owns. `own` layers have only the module's direct parameters."""

    path: str
    parameters: tuple[str, ...]
    shared: tuple[str, ...]
    own: bool


def find_layers(model: nn.Module) -> tuple[Layer, ...]:
    """Layers in the order of the module tree, which is the order of construction."""
    chosen: list[tuple[str, bool]] = []
    _choose("", model, chosen, sum(p.numel() for p in model.parameters()) // LARGE_SHARE)
    names = _first_names(model)
    owned: set[int] = set()
    layers = []
    for path, own in chosen:
        module = model.get_submodule(path)
        parameters: list[str] = []
        shared: list[str] = []
        for parameter in module.parameters(recurse=not own):
            (shared if id(parameter) in owned else parameters).append(names[id(parameter)])
            owned.add(id(parameter))
        layers.append(Layer(path=path, parameters=tuple(parameters), shared=tuple(shared), own=own))
    return tuple(layers)


def _choose(path: str, module: nn.Module, chosen: list[tuple[str, bool]], large: int) -> None:
    children = [(name, child) for name, child in module.named_children() if _has_parameters(child)]
    small = len(children) < 2 or sum(p.numel() for p in module.parameters()) <= large
    if small and not _repeats_below(module) and _runs(module):
        if _has_parameters(module):
            chosen.append((path, False))
        return
    if any(True for _ in module.parameters(recurse=False)):
        chosen.append((path, True))
    alike = Counter(_structure(child) for _, child in children)
    for name, child in children:
        below = f"{path}.{name}" if path else name
        if alike[_structure(child)] > 1 and _runs(child):
            chosen.append((below, False))
        else:
            _choose(below, child, chosen, large)


def _runs(module: nn.Module) -> bool:
    """Whether the module has a forward; a bare container is never called, so nothing could be fetched for it."""
    return type(module).forward is not nn.Module.forward


def _repeats_below(module: nn.Module) -> bool:
    """Whether some stack of at least two alike modules, each of more than one parameter tensor, lies below."""
    children = [child for child in module.children() if _has_parameters(child)]
    alike = Counter(_structure(child) for child in children if len(list(child.parameters())) > 1)
    stacked = isinstance(module, (nn.ModuleList, nn.Sequential)) and any(count > 1 for count in alike.values())
    return stacked or any(_repeats_below(child) for child in children)


def _structure(module: nn.Module) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    return tuple((name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters(remove_duplicate=False))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _first_names(model: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return names
