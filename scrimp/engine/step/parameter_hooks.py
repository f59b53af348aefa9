"""Hooks on parameters: those of the user, and the engine's own, which takes each gradient as it is made.

Tensor hooks (`parameter.register_hook`) are torch's: the weight has those of the parameter it replaced, and torch runs them.
Post-accumulate hooks run here, before the gradient is taken: afterwards there is none.
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
    """Torch keeps hooks where the garbage collector does not look: through one of its own an engine would live for ever."""

    def receive(parameter: torch.Tensor) -> None:
        alive = engine()
        if alive is not None:
            alive.receive(parameter)

    return receive


class Hooks:
    """The user's post-accumulate hooks, by the id of the weight. `micro_batches`: more than one gives each hook a part of the
    gradient, where plain PyTorch gives it the sum so far: that is refused."""

    def __init__(self, *, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._by_weight: dict[int, dict[int, Hook]] = {}

    def take_over(self, source: nn.Parameter, name: str) -> Callable[[nn.Parameter], None]:
        """A parameter's hooks; the result gives them to the weight that replaces it. The user's handles still remove them."""
        share = share_tensor_hooks(source)
        post = post_accumulate_hooks(source)
        if post:
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
        if self._micro_batches > 1:
            raise RunError(
                f"{name} has a post-accumulate hook, and gradients are accumulated over several micro-batches: the hook would "
                "see each part alone, where PyTorch shows it their sum. Use micro_batches=1, or register_hook, which sees parts "
                "too"
            )


def run_hooks(hooks: list[Hook], parameter: torch.Tensor, name: str) -> bool:
    """The user's hooks on a gradient that is there; whether there still is one. The weight itself must be there, and stay."""
    before = parameter.detach().clone()
    for hook in hooks:
        hook(parameter)
    if not torch.equal(before.view(torch.uint8), parameter.detach().contiguous().view(torch.uint8)):
        raise RunError(
            f"a post-accumulate hook changed the weight {name} itself, which has no effect on its fp32 master; change the "
            "gradient, or use engine.full_parameters() between steps"
        )
    return parameter.grad is not None
