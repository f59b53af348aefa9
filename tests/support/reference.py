"""Plain training loops: what the engine's numbers must equal, bit for bit on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
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
    micro_batches: int = 1,
    loss_of: Callable[[Any], torch.Tensor] = lambda out: out,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """PyTorch as anyone would write it."""
    model = copy.deepcopy(model).train()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    losses = []
    for batch in batches:
        parts = []
        for k in range(micro_batches):
            loss = loss_of(model(*(tensor.chunk(micro_batches)[k] for tensor in batch)))
            (loss / micro_batches if micro_batches > 1 else loss).backward()
            parts.append(loss.detach())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(parts).mean()))
    return model.state_dict(), losses


def train_16(
    dtype: torch.dtype,
    model: nn.Module,
    batches: list[Batch],
    make: MakeOptimizer,
    *,
    clip: float | None = None,
    micro_batches: int = 1,
    loss_of: Callable[[Any], torch.Tensor] = lambda out: out,
    device: str = "cpu",
    updated_on: str = "cpu",
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """16-bit copies of the weights make 16-bit gradients; those are cast to fp32 for masters that a fused optimizer
    updates. In fp16 the loss is scaled, and the scale halves when a gradient overflows."""
    model = copy.deepcopy(model).train().to(device)
    masters: dict[nn.Parameter, torch.Tensor] = {}
    statistics = {id(p) for m in model.modules() if getattr(m, "running_mean", None) is not None for p in m.parameters()}
    for parameter in model.parameters():
        masters[parameter] = parameter.detach().to(updated_on, torch.float32, copy=True).requires_grad_(parameter.requires_grad)
        if id(parameter) not in statistics:  # BatchNorm stays in fp32
            parameter.data = parameter.data.to(dtype)
    trained = [master for parameter, master in masters.items() if parameter.requires_grad]
    optimizer = make(trained)
    losses = []
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    for batch in batches:
        parts = []
        for k in range(micro_batches):
            loss = loss_of(model(*(_cast(tensor.chunk(micro_batches)[k].to(device), dtype) for tensor in batch)))
            parts.append(loss.detach())
            loss = loss * scale if scale != 1 else loss
            (loss / micro_batches if micro_batches > 1 else loss).backward()
        losses.append(float(torch.stack(parts).float().mean()))
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in masters if p.grad is not None]
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.to(updated_on).float() / scale
            parameter.grad = None
        if scale != 1 and not all(master.grad.isfinite().all() for master in trained if master.grad is not None):
            scale /= 2
            continue
        if clip is not None and device == updated_on:
            nn.utils.clip_grad_norm_(trained, clip)
        elif clip is not None:  # as clip_grad_norm_ does it, where the gradients were made
            total = torch.linalg.vector_norm(torch.stack(norms).cpu()) / scale
            for master in trained:
                if master.grad is not None:
                    master.grad.mul_(torch.clamp(clip / (total + 1e-6), max=1.0))
        optimizer.step()
        for parameter, master in masters.items():
            parameter.data.copy_(master.data)
    state = model.state_dict(keep_vars=True)
    by_id = {id(parameter): master.detach() for parameter, master in masters.items() if parameter.requires_grad}
    return {name: by_id.get(id(value), value.detach()) for name, value in state.items()}, losses


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


train_bf16 = partial(train_16, torch.bfloat16)
train_fp16 = partial(train_16, torch.float16)
