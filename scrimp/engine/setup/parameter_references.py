"""Finds references to parameters outside `_parameters`: in plain attributes, lists and dicts of modules.

`nn.RNNBase` has them: its forward reads a list. Such a reference must follow the parameter, or the module would use an object
that the engine has emptied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from scrimp.engine.setup.rnn_private import forget_weak_references

OWN = {"_parameters", "_buffers", "_modules"}

Set = Callable[[nn.Parameter], None]


def references(model: nn.Module, parameters: set[int]) -> dict[int, list[Set]]:
    """By the id of each parameter: one setter for each reference, which puts another object in its place."""
    found: dict[int, list[Set]] = {}
    for module in model.modules():
        forget_weak_references(module)
        for attribute, value in vars(module).items():
            if attribute in OWN:
                continue
            for parameter, put in _inside(vars(module), attribute, value):
                if id(parameter) in parameters:
                    found.setdefault(id(parameter), []).append(put)
    return found


def _inside(holder: Any, key: Any, value: Any) -> Iterator[tuple[nn.Parameter, Set]]:
    if isinstance(value, nn.Parameter):
        yield value, lambda parameter: holder.__setitem__(key, parameter)
    elif type(value) in (list, dict):
        for inner, item in enumerate(value) if isinstance(value, list) else value.items():
            yield from _inside(value, inner, item)
