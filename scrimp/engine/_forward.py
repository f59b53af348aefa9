"""Standing between the layers of a model: each layer's forward first brings its weights, and may be recomputed.

The module's own `forward` is replaced on the instance, not hooked: a recomputation calls it without the module's hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scrimp.engine._resident import Residents


def watch_layers(model: nn.Module, residents: Residents, recomputing: Callable[[], bool]) -> None:
    for index, layer in enumerate(residents.store.table.layers):
        module = model.get_submodule(layer.path)
        whole = any(slot.name.count(".") > layer.path.count(".") + bool(layer.path) for slot in layer.slots)
        module.forward = _Forward(module.forward, index, residents, recomputing if whole else lambda: False)


class _Forward:
    def __init__(self, forward: Callable[..., Any], layer: int, residents: Residents, recomputing: Callable[[], bool]) -> None:
        self.forward = forward
        self.layer = layer
        self.residents = residents
        self.recomputing = recomputing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.recomputing() and torch.is_grad_enabled():
            return checkpoint(self.residents.meter.replayed(self.run), *args, use_reentrant=False, **kwargs)
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with self.residents.running(self.layer):
            return self.forward(*args, **kwargs)
