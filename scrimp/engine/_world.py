"""Which ranks train together: the default process group if there is one, one made under torchrun, else this process alone."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from scrimp.chunks._wire import Wire


def join_world(device: torch.device) -> Wire:
    if not dist.is_available():
        return Wire()
    if not dist.is_initialized() and "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if not dist.is_initialized():
        return Wire()
    return Wire(world=dist.get_world_size(), rank=dist.get_rank())


def share_buffers(wire: Wire, model: nn.Module) -> None:
    """As DDP does before a forward: every rank starts from rank 0's buffers."""
    if wire.world == 1:
        return
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
