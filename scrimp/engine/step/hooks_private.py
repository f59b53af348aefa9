"""Access to the hooks of a parameter, which torch stores under private names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def share_tensor_hooks(source: nn.Parameter) -> Callable[[nn.Parameter], None]:
    """The hooks of `register_hook`; the result gives another parameter the same dict, so that handles remove from both."""
    hooks = source._backward_hooks

    def share(target: nn.Parameter) -> None:
        if hooks is not None:
            target._backward_hooks = hooks

    return share


def post_accumulate_hooks(source: nn.Parameter) -> dict[int, Callable[[torch.Tensor], Any]] | None:
    """The dict of `register_post_accumulate_grad_hook`, or None if there was never one."""
    return getattr(source, "_post_accumulate_grad_hooks", None)
