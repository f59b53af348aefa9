"""Hooks on parameters: the user's, and the engine's own, which consumes each gradient when autograd makes it.

Tensor hooks (`parameter.register_hook`) move to the weight that replaces the parameter, and torch runs them. Post-accumulate
hooks run here, before the engine consumes the gradient, because afterwards there is none.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from scrimp.engine.step.hooks_private import post_accumulate_hooks, share_tensor_hooks
from scrimp.errors import RunError

if TYPE_CHECKING:
    from scrimp.engine._training import Training

Hook = Callable[[torch.Tensor], Any]


def receiving(engine: weakref.ref[Training]) -> Callable[[torch.Tensor], None]:
    """The engine's hook, with a weak reference: the garbage collector does not see hooks, so the engine would never be freed."""

    def receive(parameter: torch.Tensor) -> None:
        alive = engine()
        if alive is not None:
            alive.receive(parameter)

    return receive


class Hooks:
    """The user's post-accumulate hooks, by the id of the weight. They are refused if `micro_batches` is more than 1: a hook would
    see one micro-batch's gradient, where plain PyTorch shows it the sum so far. Under a plan all hooks are refused."""

    def __init__(self, *, micro_batches: int, planned: bool = False) -> None:
        self._micro_batches, self._planned = micro_batches, planned
        self._by_weight: dict[int, dict[int, Hook]] = {}

    def adopt(self, source: nn.Parameter, name: str) -> Callable[[nn.Parameter], None]:
        """Takes a parameter's hooks; the result gives them to the weight that replaces it. The user's handles still work."""
        share = share_tensor_hooks(source)
        post = post_accumulate_hooks(source)
        if post or (self._planned and source._backward_hooks):
            self._check(name)

        def give(weight: nn.Parameter) -> None:
            share(weight)
            if post is not None:
                self._by_weight[id(weight)] = post

        return give

    def add(self, weight: nn.Parameter, name: str, hook: Hook) -> RemovableHandle:
        self._check(name)
        hooks = self._by_weight.setdefault(id(weight), OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def of(self, weight: torch.Tensor) -> list[Hook]:
        return [*self._by_weight.get(id(weight), {}).values()]

    def _check(self, name: str) -> None:
        if self._planned:
            raise RunError(f"{name} has a hook: under a plan autograd does not run, and no rank has a whole gradient; remove it")
        if self._micro_batches > 1:
            raise RunError(
                f"{name} has a post-accumulate hook, and gradients are accumulated over several micro-batches: the hook would "
                "see each micro-batch alone, where PyTorch shows it their sum. Use micro_batches=1, or register_hook, which sees "
                "each micro-batch too"
            )


def run_hooks(hooks: list[Hook], parameter: torch.Tensor, name: str) -> bool:
    """Runs the user's hooks on a gradient; returns whether one is left. The weight must be resident, and must not change."""
    before = parameter.detach().clone()
    for hook in hooks:
        hook(parameter)
    if not torch.equal(before.view(torch.uint8), parameter.detach().contiguous().view(torch.uint8)):
        raise RunError(
            f"a post-accumulate hook changed the weight {name} itself, which has no effect on its fp32 master; change the "
            "gradient, or use engine.full_parameters() between steps"
        )
    return parameter.grad is not None
