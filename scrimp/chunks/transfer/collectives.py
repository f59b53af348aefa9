"""Collectives on chunks: all-gather of the shards, reduce-scatter of the gradients.

Both move a one-dimensional array between `[dp]` and `[-]`, so they are scrimp's own moves: checked, with a timeout, the same on
gloo and NCCL. With one rank they are copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from scrimp.layout import Mesh
from scrimp.move import synthesize

JOINED_NBYTES = 8 << 20


class Wire:
    """A group of ranks. `device`: where messages are, the ranks' own device with NCCL, the CPU with gloo."""

    def __init__(self, world: int = 1, rank: int = 0, group: Any = None, device: torch.device | None = None) -> None:
        self.world = world
        self.rank = rank
        self.group = group
        self.device = device or torch.device("cpu")
        self.mesh = Mesh({"dp": world})

    def gather(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Concatenate every rank's `part` into `whole`."""
        if self.world == 1:
            whole.copy_(part, non_blocking=True)
            return
        program = synthesize(tuple(whole.shape), self.mesh, "[dp]", "[-]", dtype=whole.dtype)
        whole.copy_(program.run(part.to(self.device), group=self.group))

    def every(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's values, in rows."""
        rows = torch.empty(self.world * values.numel(), dtype=values.dtype)
        self.gather(values.reshape(-1), rows)
        return rows.view(self.world, *values.shape)

    def reduce(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the mean over the ranks."""
        if self.world == 1:
            return whole
        program = synthesize(tuple(whole.shape), self.mesh, "[-]+dp", "[dp]", dtype=whole.dtype)
        return program.run(whole, group=self.group).div_(self.world)

    def from_first(self, values: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The values of rank `first` on every rank; theirs must have the same shape."""
        if self.world == 1:
            return values
        return self.sum(values if self.rank == first else torch.zeros_like(values))

    def each_from_first(self, values: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Rank 0's values on every rank, one tensor after the other. Small ones of one dtype travel together, because a message
        takes longer than their bytes; no more than `JOINED_NBYTES` are read ahead. Where all ranks have the same values already,
        as after the same initialisation, only a hash travels."""
        waiting: list[torch.Tensor] = []
        for each in values:
            if waiting and (each.dtype != waiting[0].dtype or sum(one.nbytes for one in (*waiting, each)) > JOINED_NBYTES):
                yield from self._joined_from_first(waiting)
                waiting = []
            waiting.append(each)
            del each
        if waiting:
            yield from self._joined_from_first(waiting)

    def _joined_from_first(self, values: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        if self.world == 1 or self._same(values):
            yield from values
            return
        flat = [each.reshape(-1).to(self.device) for each in values]
        found = self.from_first(torch.cat(flat) if len(flat) > 1 else flat[0])
        for each, part in zip(values, torch.split(found, [each.numel() for each in values]), strict=True):
            yield part.view(each.shape).to(each.device)

    def _same(self, values: list[torch.Tensor]) -> bool:
        """Whether all ranks have the same bits, by hashes of 256 bits. NCCL sends the bits faster than the host hashes them."""
        if self.device.type != "cpu":
            return False
        found = hashlib.blake2b(digest_size=32)
        for each in values:
            bits: Any = each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            found.update(bits)
        rows = self.every(torch.frombuffer(bytearray(found.digest()), dtype=torch.int64))
        return bool((rows == rows[0]).all())

    def meet(self) -> None:
        """Barrier."""
        if self.world > 1:
            self.sum(torch.zeros(1))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of a tensor that every rank has."""
        if self.world == 1:
            return values
        flat = values.reshape(-1).to(self.device)
        program = synthesize(tuple(flat.shape), self.mesh, "[-]+dp", "[-]", dtype=values.dtype)
        return program.run(flat, group=self.group).view(values.shape).to(values.device)
