"""The ranks of a Lightning run, and the collectives that Lightning needs between them. torchrun starts them, or the caller has
made a process group already."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from scrimp.errors import RunError


@dataclass(frozen=True)
class Ranks:
    """This process among all of them. `local`: its position among those of this host."""

    world: int = 1
    rank: int = 0
    local: int = 0

    @classmethod
    def here(cls) -> Ranks:
        if dist.is_available() and dist.is_initialized():
            rank = dist.get_rank()
            return cls(dist.get_world_size(), rank, int(os.environ.get("LOCAL_RANK", rank)))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return cls(*(int(os.environ[name]) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")))
        return cls()

    def check_devices(self, devices: int, nodes: int) -> None:
        """Raises unless Lightning was told of as many devices as there are ranks."""
        if devices * nodes == self.world:
            return
        if self.world == 1:
            raise RunError(
                f"the Trainer has {devices} devices on {nodes} nodes, and this is one process: start the script with "
                f"`torchrun --nproc-per-node {devices} train.py`, or give Trainer(devices=1)"
            )
        raise RunError(
            f"torchrun started {self.world} ranks, and the Trainer has {devices} devices on {nodes} nodes: give "
            f"Trainer(devices={self.world // nodes}, num_nodes={nodes}), with as many devices as ranks on a node"
        )


def join(device: torch.device, world: int) -> None:
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def wait(world: int) -> None:
    if world > 1:
        dist.barrier()


def from_rank(value: Any, world: int, source: int) -> Any:
    """Lightning's own objects, such as paths; dist pickles them on their way."""
    if world == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def reduced(value: Any, world: int, group: Any, how: Any) -> Any:
    """A tensor combined over all ranks, in place, as Lightning's reduce does; "mean" is the sum divided by their number."""
    if world == 1 or not isinstance(value, torch.Tensor):
        return value
    name = how.lower() if isinstance(how, str) else str(how or "sum").rpartition(".")[2].lower()
    mean = name in ("mean", "avg")
    dist.all_reduce(value, op=dist.ReduceOp.SUM if mean else getattr(dist.ReduceOp, name.upper()), group=group)
    if mean:
        value.copy_(value / dist.get_world_size(group))
    return value
