"""torch's own fused updates, by private names of torch."""

from __future__ import annotations

from typing import assert_never

import torch

from scrimp.chunks.tables.optimizers import SGD, AdamW, Optimizer


def update(
    optimizer: Optimizer, lr: float, count: int, master: torch.Tensor, gradient: torch.Tensor, states: list[torch.Tensor]
) -> None:
    """Updates fp32 tensors. `count`: number of updates of the parameter, this one included."""
    if isinstance(optimizer, AdamW):
        beta1, beta2 = optimizer.betas
        number = torch.full((), float(count), dtype=torch.float32, device=master.device)  # filled on the device, without a copy
        torch._fused_adamw_(
            [master], [gradient], [states[0]], [states[1]], [], [number],
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=optimizer.weight_decay, eps=optimizer.eps,
            amsgrad=False, maximize=False, grad_scale=None, found_inf=None,
        )  # fmt: skip
    elif isinstance(optimizer, SGD):
        torch._fused_sgd_(
            [master], [gradient], states[:1] if optimizer.momentum else [],  # a group may have none
            weight_decay=optimizer.weight_decay, momentum=optimizer.momentum, lr=lr, dampening=optimizer.dampening,
            nesterov=optimizer.nesterov, maximize=False, is_first_step=count == 1, grad_scale=None, found_inf=None,
        )  # fmt: skip
    else:
        assert_never(optimizer)
