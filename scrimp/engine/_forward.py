"""Standing between the layers of a model: each layer's forward first brings its weights, and may be computed again.

The module's own `forward` is replaced on the instance, not hooked: a recomputation calls it without the module's hooks.
A recomputed layer keeps its inputs for backward, and may park them on the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scrimp.engine._parking import Parked
from scrimp.engine._resident import Residents


@dataclass
class Recompute:
    """Which layers are computed again in backward, and whether their inputs are parked on the host until then."""

    recomputable: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    parked: bool = False


def watch_layers(model: nn.Module, residents: Residents, recompute: Recompute) -> None:
    wholes = set()
    for index, layer in enumerate(residents.store.table.layers):
        if not layer.watched:
            continue
        module = model.get_submodule(layer.path)
        if any(slot.name.count(".") > layer.path.count(".") + bool(layer.path) for slot in layer.slots):
            wholes.add(index)
        module.forward = _Forward(module, index, residents, recompute)
    recompute.recomputable = frozenset(wholes)


class _Forward:
    def __init__(self, module: nn.Module, layer: int, residents: Residents, recompute: Recompute) -> None:
        self.forward: Callable[..., Any] = module.forward
        self.layer = layer
        self.residents = residents
        self.recompute = recompute
        self.buffers = [buffer for buffer in module.buffers() if buffer is not None]
        self.changed: list[torch.Tensor] = []  # buffers that a forward writes: running statistics
        self.dummy = torch.empty(0, device=residents.store.device)  # tells checkpoint which device's random state to keep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.layer in self.recompute.again and torch.is_grad_enabled():
            inputs = Parked(args, kwargs, self.residents.store, self.residents.meter)
            run = self.residents.meter.replayed(lambda _: self.once_or_again(inputs))
            return checkpoint(run, self.dummy, use_reentrant=False)
        return self.run(args, kwargs)

    def once_or_again(self, inputs: Parked) -> Any:
        if not inputs.used:
            out = self.run(*inputs.bring())
            if self.recompute.parked:
                inputs.park()
            return out
        before = [buffer.clone() for buffer in self.changed]
        live = self.residents.meter.live_nbytes
        args, kwargs = inputs.bring()
        try:
            return self.run(args, kwargs)
        finally:  # a recomputation is cut short by an exception when it has made all that backward needs
            with torch.no_grad():
                for buffer, old in zip(self.changed, before, strict=True):
                    buffer.copy_(old)
            if self.residents.tracing:
                kept = self.residents.meter.live_nbytes - live
                self.residents.kept_nbytes[self.layer] = max(kept, self.residents.kept_nbytes.get(self.layer, 0))

    def run(self, args: Any, kwargs: Any) -> Any:
        with self.residents.running(self.layer):
            if torch._C._current_graph_task_id() != -1:
                return self.forward(*args, **kwargs)
            with self.residents.timing.of(self.layer):
                if not self.residents.tracing:
                    return self.forward(*args, **kwargs)
                before = [buffer.clone() for buffer in self.buffers]
                out = self.forward(*args, **kwargs)
            # Not by their versions: batch norm writes its statistics past them.
            self.changed = [b for b, old in zip(self.buffers, before, strict=True) if not torch.equal(b, old)]
            return out
