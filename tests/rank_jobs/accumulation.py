"""What ranks do in the tests of accumulation over calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from scrimp import zoo
from scrimp.chunks.tables.optimizers import AdamW
from scrimp.engine import Engine, Memory


def train(by_calls: bool, steps: int, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """This rank's share of batches of 8, in two micro-batches."""
    torch.manual_seed(0)
    optimizer, memory = AdamW(lr=1e-2, eps=1e-4), Memory(device="1GiB")
    engine = Engine(zoo.build("gpt-tiny"), optimizer=optimizer, memory=memory, device="cpu", micro_batches=2, **settings)
    world, rank, losses = dist.get_world_size(), dist.get_rank(), []
    for step in range(steps):
        batch = [tensor.chunk(world)[rank] for tensor in zoo.example_batch("gpt-tiny", batch=8, step=step)]
        if by_calls:
            parts = [engine.backward(*(tensor.chunk(2)[k] for tensor in batch)) for k in range(2)]
            engine.update()
            losses.append(float(torch.stack(parts).mean()))
        else:
            losses.append(float(engine.step(*batch)))
    return {name: value.clone() for name, value in engine.iter_state()}, losses
