"""Plain training loops: what the engine's numbers must equal, bit for bit on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]
MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def train_fp32(
    model: nn.Module,
    batches: list[Batch],
    make: MakeOptimizer,
    *,
    clip: float | None = None,
    accumulate: int = 1,
    loss_of: Callable[[Any], torch.Tensor] = lambda out: out,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """PyTorch as anyone would write it."""
    model = copy.deepcopy(model).train()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    losses = []
    for batch in batches:
        parts = []
        for k in range(accumulate):
            loss = loss_of(model(*(tensor.chunk(accumulate)[k] for tensor in batch)))
            (loss / accumulate if accumulate > 1 else loss).backward()
            parts.append(loss.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(parts).mean()))
    return model.state_dict(), losses


def train_bf16(
    model: nn.Module,
    batches: list[Batch],
    make: MakeOptimizer,
    *,
    clip: float | None = None,
    accumulate: int = 1,
    loss_of: Callable[[Any], torch.Tensor] = lambda out: out,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """bf16 copies of the weights make bf16 gradients; those are cast to fp32 for masters that a fused AdamW updates."""
    model = copy.deepcopy(model).train()
    masters: dict[nn.Parameter, torch.Tensor] = {}
    for parameter in model.parameters():
        masters[parameter] = parameter.detach().float().clone().requires_grad_(parameter.requires_grad)
        parameter.data = parameter.data.to(torch.bfloat16)
    trained = [master for parameter, master in masters.items() if parameter.requires_grad]
    optimizer = make(trained)
    losses = []
    for batch in batches:
        parts = []
        for k in range(accumulate):
            loss = loss_of(model(*(_bf16(tensor.chunk(accumulate)[k]) for tensor in batch)))
            (loss / accumulate if accumulate > 1 else loss).backward()
            parts.append(loss.detach())
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        if clip is not None:
            nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        for parameter, master in masters.items():
            parameter.data.copy_(master.data)
        losses.append(float(torch.stack(parts).float().mean()))
    state = model.state_dict(keep_vars=True)
    by_id = {id(parameter): master.detach() for parameter, master in masters.items() if parameter.requires_grad}
    return {name: by_id.get(id(value), value.detach()) for name, value in state.items()}, losses


def _bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
