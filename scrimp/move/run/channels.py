"""Messages between pipeline stages over a backend without tags, which is NCCL: each channel has a process group of its own.

Messages of two ranks in one group meet in the order in which both post them, and a rank's messages in one group run one after the
other, on one stream. So a channel goes one way, from the ranks of one stage to those of another, and the receivers post in the
order of the sends. A group for both ways could end in a deadlock: two ranks that send first would each wait for the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from scrimp.errors import MoveError
from scrimp.move.run.comm import raw_bytes
from scrimp.move.run.peers import Handle, Parts, Peers
from scrimp.move.run.received import count_received
from scrimp.move.run.torch_private import group_timeout


@dataclass(frozen=True, kw_only=True)
class Channel:
    """From one stage to another. `tags`: of its tensors. `pairs`: which rank of the first stage sends to which rank of the second
    one. Each rank of both stages is in one pair or more."""

    sender: int
    receiver: int
    tags: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]


class ChannelPeers(Peers):
    """`channels`: the same on all ranks. `device`: where tensors are.

    A message of NCCL runs on the stream of its group. That stream first waits for what the current stream has queued when the
    message is posted: torch records an event there, for a receive too (`syncStream` in `ProcessGroupNCCL::pointToPoint`). So a
    buffer may be received into again once its copy is queued. `wait` makes the current stream wait, not the host."""

    ordered = True

    def __init__(self, size: int, channels: Sequence[Channel], device: torch.device) -> None:
        super().__init__(size)
        self._channels, self._device = tuple(channels), device
        self._number = {(each.sender, each.receiver, tag): k for k, each in enumerate(channels) for tag in each.tags}
        self._groups: list[Any] = []

    def join(self) -> None:
        """Makes the groups once. All ranks make all of them in one order."""
        if self._groups:
            return
        size, timeout = self.size, group_timeout(dist.group.WORLD, self._device)
        for each in self._channels:
            ranks = sorted(stage * size + rank for stage in (each.sender, each.receiver) for rank in range(size))
            self._groups.append(dist.new_group(ranks, timeout=timeout))
        for each, group in zip(self._channels, self._groups, strict=True):
            self._connect(each, group)

    def send(self, parts: Parts, stage: int, tag: int) -> Handle:
        return self._post(dist.isend, parts, self._group(dist.get_rank() // self.size, stage, tag), stage, "to")

    def receive(self, parts: Parts, stage: int, tag: int) -> Handle:
        for _, tensor in parts:
            count_received(tensor.nbytes)
        return self._post(dist.irecv, parts, self._group(stage, dist.get_rank() // self.size, tag), stage, "from")

    def spread(self, tensor: torch.Tensor, stage: int) -> None:
        """By a broadcast of the default group, on the backend's device."""
        root = stage * self.size
        here = tensor if tensor.device.type == self._device.type else tensor.to(self._device)
        try:
            dist.broadcast(raw_bytes(here), src=root)
        except RuntimeError as error:
            raise MoveError(f"a tensor of rank {root} of stage {stage} did not arrive: {error}") from error
        if dist.get_rank() != root:
            count_received(tensor.nbytes)
        if here is not tensor:
            tensor.copy_(here)

    def close(self) -> None:
        for group in self._groups:
            if dist.is_initialized() and group is not dist.GroupMember.NON_GROUP_MEMBER:
                with suppress(ValueError, AssertionError):  # the user has already destroyed all groups
                    dist.destroy_process_group(group)
        self._groups = []

    def _group(self, sender: int, receiver: int, tag: int) -> Any:
        return self._groups[self._number[sender, receiver, tag]]

    def _post(self, call: Callable[..., Any], parts: Parts, group: Any, stage: int, way: str) -> Handle:
        """The messages of one tensor are one batch on both sides, so that they need no order among themselves."""
        what = f"a tensor {way} ranks {', '.join(str(stage * self.size + rank) for rank, _ in parts)} of stage {stage}"
        ops = [dist.P2POp(call, raw_bytes(tensor), group=group, peer=stage * self.size + rank) for rank, tensor in parts]
        return Handle([(work, what) for work in dist.batch_isend_irecv(ops)] if ops else [])

    def _connect(self, channel: Channel, group: Any) -> None:
        """Each pair exchanges a byte, all in one batch. NCCL connects two ranks at their first message, and the call of the first
        one blocks until then. In a step two ranks could be in such calls for different channels, and wait for each other."""
        mine, size, byte = dist.get_rank(), self.size, torch.zeros(1, dtype=torch.uint8, device=self._device)
        ops = []
        for sender, receiver in ((channel.sender * size + a, channel.receiver * size + b) for a, b in channel.pairs):
            if sender == mine:
                ops.append(dist.P2POp(dist.isend, byte, group=group, peer=receiver))
            elif receiver == mine:
                ops.append(dist.P2POp(dist.irecv, torch.empty_like(byte), group=group, peer=sender))
        what = f"the first message between stages {channel.sender} and {channel.receiver}"
        Handle([(work, what) for work in dist.batch_isend_irecv(ops)] if ops else []).wait()
