"""The ranks of a run: which one this is, and what they tell each other between steps, over a gloo group on the CPU."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from scrimp.engine import meet_under_torchrun

RESTARTS = "TORCHELASTIC_RESTART_COUNT"


@dataclass
class Ranks:
    """`here`: ranks on this machine. `local`: the number among them. Rank 0 decides what must be the same everywhere."""

    rank: int = 0
    world: int = 1
    local: int = 0
    here: int = 1
    group: Any = None
    made: bool = False  # whether this object made the process group

    @property
    def first(self) -> bool:
        return self.rank == 0

    def from_first(self, data: Any) -> Any:
        """Rank 0's data, which must be JSON; other ranks' are not used."""
        if self.world == 1:
            return data
        text = json.dumps(data).encode() if self.first else b""
        length = torch.tensor([len(text)])
        dist.broadcast(length, src=0, group=self.group)
        block = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8) if self.first else torch.empty(int(length), dtype=torch.uint8)
        )
        dist.broadcast(block, src=0, group=self.group)
        return json.loads(bytes(block.tolist()))

    def mean_and_most(self, value: float, number: int) -> tuple[float, int]:
        """The mean of one number and the largest of another, over all ranks, in one exchange."""
        if self.world == 1:
            return value, number
        every = [torch.empty(2, dtype=torch.float64) for _ in range(self.world)]
        dist.all_gather(every, torch.tensor([value, number], dtype=torch.float64), group=self.group)
        return sum(float(each[0]) for each in every) / self.world, max(int(each[1]) for each in every)

    def leave(self) -> None:
        if dist.is_available() and dist.is_initialized() and (self.made or self.group is not None):
            dist.destroy_process_group(None if self.made else self.group)
        self.group = None


def join(device: str | None) -> Ranks:
    """Joins the process group, and makes it under torchrun, as the engine would. `device`: that of [train]."""
    made = False
    if dist.is_available() and not dist.is_initialized() and "TORCHELASTIC_RUN_ID" in os.environ:
        cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        meet_under_torchrun("cuda" if cuda else "cpu")
        made = True
    if not dist.is_available() or not dist.is_initialized():
        return Ranks()
    rank, world = dist.get_rank(), dist.get_world_size()
    local, here = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", world))
    group = dist.new_group(backend="gloo") if world > 1 else None
    return Ranks(rank=rank, world=world, local=local, here=here, group=group, made=made)


def restarted() -> bool:
    """Whether torchrun started these ranks again after a failure."""
    return int(os.environ.get(RESTARTS, "0") or 0) > 0
