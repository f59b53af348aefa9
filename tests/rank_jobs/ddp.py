"""What ranks do in the tests of the DDP door."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scrimp import zoo
from scrimp.ext import ddp
from scrimp.ext.ddp import SparseState, sparse_hook

State = dict[str, torch.Tensor]


def model_of(name: str) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(zoo.build(name), bucket_cap_mb=0.1)


def batch_of(name: str, step: int) -> list[torch.Tensor]:
    world, rank = dist.get_world_size(), dist.get_rank()
    return [tensor.chunk(world)[rank] for tensor in zoo.example_batch(name, batch=8, step=step)]


def weights(model: nn.Module) -> State:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def dense(name: str, steps: int, momentum: float) -> State:
    """DDP with SGD."""
    model = model_of(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    for step in range(steps):
        optimizer.zero_grad()
        model(*batch_of(name, step)).backward()
        optimizer.step()
    return weights(model.module)


def sparse(name: str, steps: int, settings: dict[str, Any], stop: int | None = None) -> tuple[State, list[float]]:
    """With the hook; at step `stop` everything is saved, and goes on in a new model and state."""
    model = model_of(name)
    state = SparseState(model, **settings)
    model.register_comm_hook(state, sparse_hook)
    losses = []
    for step in range(steps):
        if step == stop:
            saved, kept = weights(model.module), state.state_dict()
            model = model_of(name)
            model.module.load_state_dict(saved)
            state = SparseState(model, **settings)
            state.load_state_dict(kept)
            model.register_comm_hook(state, sparse_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer.zero_grad()
        loss = model(*batch_of(name, step))
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
    return weights(model.module), losses


def not_finite(name: str) -> tuple[bool, State, State, bool]:
    """Rank 1 has a NaN in step 2: whether all gradients say so, what was kept before and after, whether step 3 is fine."""
    model = model_of(name)
    state = SparseState(model, density=0.05, momentum=0.0)
    model.register_comm_hook(state, sparse_hook)
    for step in range(4):
        model.zero_grad()
        before = _residuals(state)
        loss = model(*batch_of(name, step))
        (loss * float("nan") if step == 2 and dist.get_rank() == 1 else loss).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if step == 2:
            found = all(bool(gradient.isnan().all()) for gradient in gradients), before, _residuals(state)
    return *found, all(bool(gradient.isfinite().all()) for gradient in gradients)


def _residuals(state: SparseState) -> State:
    return {name: kept.rest.tensors["values"].clone() for name, kept in state.kept.items()}


def corrupt(name: str, rank: int, byte: int) -> None:
    """One rank's packet is not what it says."""
    model = model_of(name)
    model.register_comm_hook(SparseState(model, density=0.05), sparse_hook)
    seal = ddp.seal

    def changed(row: torch.Tensor, step: int, *, finite: bool) -> None:
        seal(row, step, finite=finite)
        if dist.get_rank() == rank and step == 1:
            row[byte] ^= 5

    ddp.seal = changed  # type: ignore[assignment]
    try:
        for step in range(2):
            model(*batch_of(name, step)).backward()
    finally:
        ddp.seal = seal
