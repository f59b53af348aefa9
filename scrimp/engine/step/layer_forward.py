"""Wraps the forward of every layer: fetches its weights first, and may recompute it in backward.

The wrapper replaces `forward` on the instance in place of a hook, because a recomputation must run it without the module's
hooks. A recomputed layer keeps its inputs for backward, and may offload them to the host meanwhile.
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

from scrimp.engine.setup.empty_parameter import NO_COPY
from scrimp.engine.step.buffers import Watch, instead
from scrimp.engine.step.input_offload import LayerInputs
from scrimp.engine.step.residency import Residents
from scrimp.errors import RunError


@dataclass
class Recompute:
    """Which layers are recomputed in backward, and whether their inputs are offloaded to the host until then."""

    recomputable: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    offloaded: bool = False


def wrap_layers(model: nn.Module, residents: Residents, recompute: Recompute) -> None:
    wholes = set()
    for index, layer in enumerate(residents.store.table.layers):
        if not layer.wrapped:
            continue
        module = model.get_submodule(layer.path)
        if any(slot.name.count(".") > layer.path.count(".") + bool(layer.path) for slot in layer.slots):
            wholes.add(index)
        module.forward = _Forward(module, index, residents, recompute)
    recompute.recomputable = frozenset(wholes)


def is_taken(model: nn.Module) -> bool:
    """Whether an engine has wrapped this model's layers already."""
    return any(isinstance(module.__dict__.get("forward"), _Forward) for module in model.modules())


class _Forward:
    def __init__(self, module: nn.Module, layer: int, residents: Residents, recompute: Recompute) -> None:
        self.forward: Callable[..., Any] = module.forward
        self.layer = layer
        self.residents = residents
        self.recompute = recompute
        self.buffers = Watch(module)
        self.dummy = torch.empty(0, device=residents.store.device)  # tells checkpoint on which device to save the random state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.residents.active:
            raise RunError(
                f"layer '{self.residents.store.table.layers[self.layer].path}' was called outside of the engine, where its "
                "weights are not there; call engine.step(*batch), engine.evaluate(*batch) for a forward without gradients, "
                "or engine.evaluate(function, ...) for a function that calls it"
            )
        if self.layer in self.recompute.again and torch.is_grad_enabled():
            self.mark_end(args, kwargs)
            inputs = LayerInputs(args, kwargs, self.residents.store, self.residents.meter)
            run = self.residents.meter.replayed(lambda _: self.once_or_again(inputs))
            return checkpoint(run, self.dummy, use_reentrant=False)
        return self.run(args, kwargs)

    def mark_end(self, args: Any, kwargs: Any) -> None:
        """A gradient's arrival does not show that backward is done with frozen weights; the gradient of the inputs does."""
        if self.residents.partly_frozen(self.layer):
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if inputs:
                register_multi_grad_hook(inputs, lambda _: self.residents.frozen_done(self.layer))

    def once_or_again(self, inputs: LayerInputs) -> Any:
        if not inputs.used:
            made, marks = self.buffers.before(tracing=self.residents.tracing)
            out = self.run(*inputs.bring())
            inputs.saw = self.buffers.after(made, marks)
            inputs.check_unchanged(self.layer, "its own forward")
            if self.recompute.offloaded:
                inputs.offload()
            return out
        inputs.check_unchanged(self.layer, "the model, after the layer had used it")
        live = self.residents.meter.live_nbytes
        args, kwargs = inputs.bring()
        try:
            with instead(inputs.saw):
                return self.run(args, kwargs)
        finally:  # checkpoint stops a recomputation by an exception once it has made all that backward needs
            inputs.saw = []
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
            return self.forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RunError(NO_COPY)
