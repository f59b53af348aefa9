"""Matches names of a state dict with those of the model; they may differ by tied names and by a base model's prefix.

A tied parameter has several names in the model, and files mostly hold one of them. A Hugging Face model with a head has its base
model under `base_model_prefix`: a file of the base model alone lacks the prefix, and a file of a model with a head has it where
the base model does not. Where transformers itself converts names, as it joins the experts of Mixtral, so does this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import torch
from torch import nn

from scrimp.engine.setup.weight_sources import Weights
from scrimp.engine.sources.conversion_private import converted
from scrimp.errors import RunError

SHOWN = 5
OLD_BUFFER = r"rotary_emb\.inv_freq$"  # computed, but old versions of transformers stored it in every layer


class Match:
    """Reads values by model name: `read(name)` takes the first name that a parameter or persistent buffer has in the model."""

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        known = {name for group, _ in _groups(model) for name in group}
        self.weights = weights = converted(model, weights, known)
        held = weights.shapes
        rename, ours = _prefix(model, held)
        self._names: dict[str, list[str]] = {}  # first name in the model -> names in the weights
        missing, wrong, expected = [], [], set()
        for names, tensor in _groups(model):
            there = [rename(name) for name in names]
            expected.update(there)
            self._names[names[0]] = found = [name for name in there if name in held]
            if not found:
                missing.append(names[0])
            wrong += [
                f"{names[0]} is {_size(tensor.shape)} in the model and {_size(held[name])} in the weights"
                for name in found
                if held[name] != tuple(tensor.shape)
            ]
        ignored = _ignored(model)
        unexpected = [name for name in held if name not in expected and ours(name) and not ignored(name)]
        if missing or unexpected or wrong:
            raise RunError(
                f"{weights.where} does not fit the {type(model).__name__}: {_list('missing', missing)}; "
                f"{_list('unexpected', unexpected)}; {_list('of another shape', wrong)}. The model has {len(self._names)} "
                f"tensors, the weights {len(held)}; their names must be those of model.state_dict()"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str) -> torch.Tensor:
        first, *others = self._names[name]
        values = self.weights.read(first)
        for other in others:
            if not torch.equal(values, self.weights.read(other)):
                raise RunError(
                    f"{first} and {other} are one parameter of the model, but differ in {self.weights.where}; "
                    "build the model without tying them, or leave one out"
                )
        return values

    def read_parameter(self, name: str) -> torch.Tensor:
        values = self.read(name)
        if not values.is_floating_point():
            raise RunError(
                f"{name} is {values.dtype} in {self.weights.where}, a quantised checkpoint; give one in bf16, fp16 or fp32"
            )
        return values if values.dtype in (torch.float32, torch.bfloat16, torch.float16) else values.float()


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(full name, module, attribute, buffer)"""
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in module._non_persistent_buffers_set:
                yield f"{path}.{attribute}" if path else attribute, module, attribute, buffer


def _groups(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Every tensor that a file should hold, with all its names."""
    groups: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), ([], parameter))[0].append(name)
    for name, _, _, buffer in persistent_buffers(model):
        groups.setdefault(id(buffer), ([], buffer))[0].append(name)
    return list(groups.values())


def _prefix(model: nn.Module, held: dict[str, tuple[int, ...]]) -> tuple[Callable[[str], str], Callable[[str], bool]]:
    """Maps a model name to its name in the weights, and tells whether a name in the weights concerns the model."""
    prefix = getattr(model, "base_model_prefix", None)
    if isinstance(prefix, str) and prefix:
        dotted = f"{prefix}."
        there = any(name.startswith(dotted) for name in held)
        if hasattr(model, prefix) and not there:
            return lambda name: name.removeprefix(dotted), lambda name: True
        if not hasattr(model, prefix) and there:
            return lambda name: dotted + name, lambda name: name.startswith(dotted)
    return lambda name: name, lambda name: True


def _ignored(model: nn.Module) -> Callable[[str], bool]:
    """Names that the model declares ignorable in a file, such as masks that old versions stored."""
    patterns = {OLD_BUFFER} if hasattr(model, "base_model_prefix") else set()
    for module in model.modules():
        patterns.update(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _list(what: str, names: list[str]) -> str:
    if not names:
        return f"none {what}"
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {what} ({', '.join(names[:SHOWN])}{more})"


def _size(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
