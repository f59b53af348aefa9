"""What a step of the user counts on its LightningModule, counted once although the engine may run the step several times.

`self.outputs.append(...)` and `self.seen += 1` are usual in steps. Numbers, lists, sets, dicts and small tensors among
the module's own attributes are put back before a further run, and so is the state of metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from scrimp.ext.lightning._package_private import Metrics

OF_TORCH = {*vars(nn.Module())}  # attributes that every module has
MOST, DEEPEST = 1000, 3  # elements of a container that is searched for further ones, and levels
MOST_NUMEL = 1 << 16  # of a tensor

Kept = tuple[list[dict[str, Any]], dict[str, Any], list[tuple[Any, Any]]]


class Counted:
    """The state of one LightningModule."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._metrics = module, Metrics(module)

    def now(self) -> Kept:
        values = {name: value for name, value in vars(self._module).items() if name not in OF_TORCH and _counts(value)}
        return self._metrics.state(), values, [(each, _copy(each)) for value in values.values() for each in _inside(value, 0)]

    def back(self, kept: Kept) -> None:
        states, values, contents = kept
        self._metrics.restore(states)
        vars(self._module).update(values)
        for there, before in contents:
            if isinstance(there, list):
                there[:] = before
            elif isinstance(there, torch.Tensor):
                with torch.no_grad():
                    there.copy_(before)
            else:
                there.clear()
                there.update(before)


def _counts(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str | list | set | dict | torch.Tensor)


def _inside(value: Any, depth: int) -> Iterator[Any]:
    """The value, and what it contains, as far as it can change in place."""
    if isinstance(value, torch.Tensor):
        if value.numel() <= MOST_NUMEL and not value.requires_grad and not value.is_inference():
            yield value
    elif isinstance(value, list | set | dict):
        yield value
        if depth < DEEPEST and len(value) <= MOST and not isinstance(value, set):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from _inside(inner, depth + 1)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [*value] if isinstance(value, list) else dict(value) if isinstance(value, dict) else {*value}
