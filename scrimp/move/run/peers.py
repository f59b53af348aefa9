"""Messages between single ranks of torch.distributed, in the background: what pipeline stages send to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from scrimp.errors import MoveError, RunError
from scrimp.move.run.comm import raw_bytes
from scrimp.move.run.received import count_received

TAGS = 1 << 28  # apart from those of moves, and of the user
SPREAD = 1 << 27

Parts = Sequence[tuple[int, torch.Tensor]]  # the other rank in its stage, and the tensor


class Handle:
    """Messages on their way, and what each of them is."""

    def __init__(self, works: Sequence[tuple[Any, str]]) -> None:
        self._works = works

    def wait(self) -> None:
        for work, what in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise MoveError(f"{what} did not arrive: {error}") from error


class Peers:
    """All ranks of the default group, stage after stage with `size` ranks each. Messages with one tag from one rank to another
    arrive in the order in which they were sent. A sent tensor must not change, and a received one is not there, before `wait`.

    `ordered`: a stage must receive tensors from another one in the order in which that one sends them, whatever their tags."""

    ordered = False

    def __init__(self, size: int) -> None:
        self.size = size

    def join(self) -> None:
        """All ranks call it before the messages of a step."""

    def send(self, parts: Parts, stage: int, tag: int) -> Handle:
        """Sends the parts of a tensor to ranks of a stage."""
        return Handle([self._send(tensor, stage, rank, tag) for rank, tensor in parts])

    def receive(self, parts: Parts, stage: int, tag: int) -> Handle:
        return Handle([self._receive(tensor, stage, rank, tag) for rank, tensor in parts])

    def spread(self, tensor: torch.Tensor, stage: int) -> None:
        """Overwrites a tensor with that of the first rank of a stage, on every rank: along a binomial tree from there. Not by
        torch's broadcast, whose thread may still hold the tensor when the call has returned."""
        root, world = stage * self.size, dist.get_world_size()
        mine = (dist.get_rank() - root) % world

        def at(number: int) -> tuple[int, int]:
            return divmod((number + root) % world, self.size)

        if mine:
            Handle([self._receive(tensor, *at(mine - (1 << mine.bit_length() - 1)), SPREAD)]).wait()
        below = [mine + (1 << bit) for bit in range(mine.bit_length(), world.bit_length()) if mine + (1 << bit) < world]
        Handle([self._send(tensor, *at(number), SPREAD) for number in below]).wait()

    def close(self) -> None:
        """Ends what `join` made."""

    def _send(self, tensor: torch.Tensor, stage: int, rank: int, tag: int) -> tuple[Any, str]:
        other = stage * self.size + rank
        return dist.isend(_bytes(tensor), other, tag=TAGS + tag), f"a tensor to rank {other} of stage {stage}"

    def _receive(self, tensor: torch.Tensor, stage: int, rank: int, tag: int) -> tuple[Any, str]:
        other = stage * self.size + rank
        count_received(tensor.nbytes)
        return dist.irecv(_bytes(tensor), other, tag=TAGS + tag), f"a tensor from rank {other} of stage {stage}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu":
        raise RunError(
            f"a pipeline stage sends a tensor on {tensor.device} over gloo, which carries tensors of the CPU alone: start the "
            "ranks with init_process_group('nccl'), or run on the CPU"
        )
    return raw_bytes(tensor)
