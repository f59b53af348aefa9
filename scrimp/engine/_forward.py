"""Standing between the layers of a model: each layer's forward first brings its weights, and may be computed again.

The module's own `forward` is replaced on the instance, not hooked: a recomputation calls it without the module's hooks.
A recomputed layer keeps its inputs for backward, and may park them on the host meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from scrimp.engine._buffers import Place, copies, places
from scrimp.engine._parking import Parked
from scrimp.engine._resident import Residents
from scrimp.errors import FitError, RunError


@dataclass
class Recompute:
    """Which layers are computed again in backward, and whether their inputs are parked on the host until then."""

    recomputable: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    parked: bool = False
    refused: bool = False  # a layer has just turned out not to be recomputable

    def refuse(self, layer: int, path: str) -> FitError:
        """For a layer whose input is another one after its forward. The step is tried again without recomputing the layer."""
        self.recomputable, self.refused = self.recomputable - {layer}, True
        return FitError(f"layer '{path}' changes its input in place, so that it cannot be recomputed from it")


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


def is_taken(model: nn.Module) -> bool:
    """Whether an engine stands between this model's layers already."""
    return any(isinstance(module.__dict__.get("forward"), _Forward) for module in model.modules())


class _Forward:
    def __init__(self, module: nn.Module, layer: int, residents: Residents, recompute: Recompute) -> None:
        self.forward: Callable[..., Any] = module.forward
        self.layer = layer
        self.residents = residents
        self.recompute = recompute
        self.buffers = places(module)
        self.changed: list[Place] = []  # buffers that a forward writes: running statistics
        self.dummy = torch.empty(0, device=residents.store.device)  # tells checkpoint which device's random state to keep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.residents.active:
            raise RunError(
                f"layer '{self.residents.store.table.layers[self.layer].path}' was called outside of the engine, where its "
                "weights are not there; call engine.step(*batch), or engine.evaluate(*batch) for a forward without gradients"
            )
        if self.layer in self.recompute.again and torch.is_grad_enabled():
            self.mark_end(args, kwargs)
            inputs = Parked(args, kwargs, self.residents.store, self.residents.meter)
            run = self.residents.meter.replayed(lambda _: self.once_or_again(inputs))
            return checkpoint(run, self.dummy, use_reentrant=False)
        return self.run(args, kwargs)

    def mark_end(self, args: Any, kwargs: Any) -> None:
        """No gradient that lands says that backward is through with frozen weights; that of the layer's inputs does."""
        if self.residents.partly_frozen(self.layer):
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if inputs:
                register_multi_grad_hook(inputs, lambda _: self.residents.through(self.layer))

    def once_or_again(self, inputs: Parked) -> Any:
        if not inputs.used:
            versions = inputs.versions()
            out = self.run(*inputs.bring())
            if inputs.versions() != versions:
                raise self.recompute.refuse(self.layer, self.residents.store.table.layers[self.layer].path)
            if self.recompute.parked:
                inputs.park()
            return out
        before = copies(self.changed)
        live = self.residents.meter.live_nbytes
        args, kwargs = inputs.bring()
        try:
            return self.run(args, kwargs)
        finally:  # a recomputation is cut short by an exception when it has made all that backward needs
            for copy in before:
                copy.back()
            if self.residents.tracing:
                kept = self.residents.meter.live_nbytes - live
                self.residents.kept_nbytes[self.layer] = max(kept, self.residents.kept_nbytes.get(self.layer, 0))

    def run(self, args: Any, kwargs: Any) -> Any:
        return self.residents.run(self.layer, lambda: self.timed(args, kwargs))

    def timed(self, args: Any, kwargs: Any) -> Any:
        timing, tracing = self.residents.timing, self.residents.tracing
        if not (timing.on or tracing) or torch._C._current_graph_task_id() != -1:
            return self.forward(*args, **kwargs)
        with timing.of(self.layer):
            before = copies(self.buffers) if tracing else []
            out = self.forward(*args, **kwargs)
        if tracing:
            self.changed = [copy.place for copy in before if copy.changed]
        return out

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RunError(
            "a model that an engine has taken over cannot be copied or pickled: its weights live in the engine; "
            "copy it before Engine(model), or load engine.state_dict() into a new one"
        )
