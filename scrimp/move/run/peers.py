"""Messages between single ranks of torch.distributed, in the background: what pipeline stages send to each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from scrimp.errors import MoveError, RunError
from scrimp.move.run.comm import raw_bytes
from scrimp.move.run.received import count_received

TAGS = 1 << 28  # apart from those of moves, and of the user
SPREAD = 1 << 27


class Handle:
    """A message on its way."""

    def __init__(self, work: Any, what: str) -> None:
        self._work, self._what = work, what

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise MoveError(f"{self._what} did not arrive: {error}") from error


class Peers:
    """All ranks of the default group, stage after stage with `size` ranks each. Messages with one tag from one rank to another
    arrive in the order in which they were sent. A sent tensor must not change, and a received one is not there, before `wait`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def send(self, tensor: torch.Tensor, stage: int, rank: int, tag: int) -> Handle:
        other = stage * self.size + rank
        return Handle(dist.isend(_bytes(tensor), other, tag=TAGS + tag), f"a tensor to rank {other} of stage {stage}")

    def receive(self, tensor: torch.Tensor, stage: int, rank: int, tag: int) -> Handle:
        other = stage * self.size + rank
        count_received(tensor.nbytes)
        return Handle(dist.irecv(_bytes(tensor), other, tag=TAGS + tag), f"a tensor from rank {other} of stage {stage}")

    def spread(self, tensor: torch.Tensor, stage: int) -> None:
        """Overwrites a tensor with that of the first rank of a stage, on every rank: along a binomial tree from there. Not by
        torch's broadcast, whose thread may still hold the tensor when the call has returned."""
        root, world = stage * self.size, dist.get_world_size()
        mine = (dist.get_rank() - root) % world

        def at(number: int) -> tuple[int, int]:
            return divmod((number + root) % world, self.size)

        if mine:
            self.receive(tensor, *at(mine - (1 << mine.bit_length() - 1)), SPREAD).wait()
        below = [mine + (1 << bit) for bit in range(mine.bit_length(), world.bit_length()) if mine + (1 << bit) < world]
        for handle in [self.send(tensor, *at(number), SPREAD) for number in below]:
            handle.wait()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise RunError(
            f"a pipeline stage sends a tensor on {tensor.device}: stages exchange tensors over gloo, which has tags, and NCCL "
            "has none; run on CPU ranks, or plan without stages"
        )
    return raw_bytes(tensor)
