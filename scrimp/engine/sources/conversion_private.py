"""Weights whose names in the file are not those of a transformers model, which joins or renames some: the experts of Mixtral.

transformers has a table of such conversions for each kind of model, and uses it in `from_pretrained`. Here the same table is
applied one parameter at a time. On shapes alone, on meta, it says beforehand which tensors there will be.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from scrimp.engine.setup.weight_sources import Weights
from scrimp.errors import RunError


def converted(model: nn.Module, weights: Weights, known: set[str]) -> Weights:
    """The same weights by the names of the model, if transformers converts them. `known`: the names of the model."""
    table = _table(model)
    if not table or known >= weights.shapes.keys():
        return weights
    found = _Converted(model, weights, table, known)
    return found if found.changes else weights


def _table(model: nn.Module) -> list[Any]:
    """The conversions of a model of transformers; none for others, and in versions before they existed."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError:
        return []
    rows = get_model_conversion_mapping(model)
    return [row for row in rows if isinstance(row, (WeightConverter, WeightRenaming))]


@dataclass(kw_only=True)
class _Group:
    """Tensors of the file that one conversion makes into tensors of the model. `converter`: None if it only renames."""

    target: str
    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)  # the pattern that each matches, and its name

    def run(self, model: nn.Module, make: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.converter is None:
            return {self.target: make(self.sources[0][1])}
        converter = deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, lambda name=name: make(name))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


class _Converted:
    """`Weights` that converts when it reads."""

    def __init__(self, model: nn.Module, weights: Weights, table: list[Any], known: set[str]) -> None:
        self.where, self._weights, self._model = weights.where, weights, model
        self._groups: dict[str, _Group] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})
        for group in self._grouped(table, known):
            for name, tensor in self._run(group, lambda each: torch.empty(weights.shapes[each], device="meta")).items():
                self._groups[name] = group
                self.shapes[name] = tuple(tensor.shape)
        self.changes = self.shapes.keys() != weights.shapes.keys()

    def read(self, name: str) -> torch.Tensor:
        group = self._groups[name]
        if group.converter is None:
            return self._weights.read(group.sources[0][1])
        if self._last[0] != group.target:
            self._last = ("", {})  # before the next ones are read
            self._last = (group.target, self._run(group, self._weights.read))
        return self._last[1].pop(name) if name in self._last[1] else self._run(group, self._weights.read)[name]

    def _grouped(self, table: list[Any], known: set[str]) -> Iterator[_Group]:
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        renamings = [row for row in table if isinstance(row, WeightRenaming)]
        converters = [row for row in table if isinstance(row, WeightConverter)]
        of_pattern = {pattern: row for row in converters for pattern in row.source_patterns}
        groups: dict[str, _Group] = {}
        for name in sorted(self._weights.shapes, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters)
            if target not in known and name in known:
                target, pattern = name, None
            converter = None if pattern is None else of_pattern[pattern]
            group = groups.setdefault(target, _Group(target=target, converter=converter))
            group.sources.append((name if pattern is None else pattern, name))
        for group in groups.values():
            if group.converter is None and len(group.sources) > 1:
                first, other = group.sources[0][1], group.sources[1][1]
                raise RunError(f"{first} and {other} of {self.where} are both {group.target} of the model")
        yield from groups.values()

    def _run(self, group: _Group, make: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        try:
            return group.run(self._model, make)
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
            names = ", ".join(name for _, name in group.sources[:3])
            raise RunError(f"{group.target} cannot be made from {names} of {self.where}: {error}") from error
