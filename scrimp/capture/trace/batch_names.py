"""Names of the tensors of a batch. This needs nothing of torch's compiler, so that a step does not load it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn


def batch_names(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """The names of the tensors among the inputs, in the order of `pytree.tree_leaves((args, kwargs))`, from the forward's
    signature."""
    words = _positions(model, len(args))
    names = []
    for path, leaf in pytree.tree_leaves_with_path((tuple(args), dict(kwargs))):
        if isinstance(leaf, Tensor):
            which, first, *rest = [str(getattr(key, "idx", getattr(key, "key", key))) for key in path]
            names.append(".".join([words[int(first)] if which == "0" else first, *rest]))
    return names


def batch_tensors(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors among the inputs, by these names."""
    leaves = (leaf for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor))
    return dict(zip(batch_names(model, args, kwargs), leaves, strict=True))


def _positions(model: nn.Module, count: int) -> list[str]:
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return [names[k] if k < len(names) else f"args.{k}" for k in range(count)]
