"""The residual of a parameter, the part of its update that was not sent yet: in fp32, in bf16, or in 8 bits.

fp32   exact: what was sent and what is kept add up to what was accumulated
bf16   rounded to nearest: an addition of less than 1/512 of the value is partly lost
int8   an even grid of 255 steps up to the largest of every 64 elements, rounded stochastically, so that it is right in the mean;
       the random numbers come from a seeded generator, so that a run can be repeated
"""

from __future__ import annotations

from typing import Protocol

import torch

from scrimp.chunks import arena
from scrimp.errors import RunError

RESIDUAL_KINDS = ("fp32", "bf16", "int8")
BLOCK, STEPS = 64, 127


class Residual(Protocol):
    """The residual of one parameter. `read` gives fp32 numbers on `device` that may be changed; `write` stores them. `tensors`
    may be on another tier: then the device holds only what is being read."""

    tensors: dict[str, torch.Tensor]
    device: torch.device

    @property
    def in_place(self) -> bool:
        """`read` returns the stored tensor itself, not a copy, so that it may be read as a whole."""

    def read(self, span: slice) -> torch.Tensor: ...

    def write(self, span: slice, values: torch.Tensor) -> None: ...


def residual(kind: str, numel: int, device: torch.device, seed: int = 0, *, at: torch.device | None = None) -> Residual:
    """A residual of zeros; stored `at` another device than the one that works on it, if given."""
    sizes = residual_tensors(kind, numel)
    pinned = at is not None and device.type == "cuda"
    zeros = {
        name: arena(size, dtype, pinned=pinned) if at is not None else torch.zeros(size, dtype=dtype, device=device)
        for name, (size, dtype) in sizes.items()
    }
    return residual_of(kind, zeros, device, seed)


def residual_of(kind: str, tensors: dict[str, torch.Tensor], device: torch.device, seed: int = 0) -> Residual:
    """A residual with existing tensors."""
    return Blocks(tensors, device, seed) if kind == "int8" else Plain(tensors, device)


def residual_tensors(kind: str, numel: int) -> dict[str, tuple[int, torch.dtype]]:
    """Elements and dtype of each tensor."""
    if kind == "int8":
        blocks = -(-numel // BLOCK)
        return {"codes": (blocks * BLOCK, torch.int8), "scales": (blocks, torch.float32)}
    if kind not in RESIDUAL_KINDS:
        raise RunError(f"residual={kind!r} is not possible; there are {', '.join(map(repr, RESIDUAL_KINDS))}")
    return {"values": (numel, torch.float32 if kind == "fp32" else torch.bfloat16)}


def residual_nbytes(kind: str, numel: int) -> int:
    return sum(size * dtype.itemsize for size, dtype in residual_tensors(kind, numel).values())


class Plain:
    """A residual in fp32 or bf16."""

    def __init__(self, tensors: dict[str, torch.Tensor], device: torch.device) -> None:
        self.tensors, self.device = tensors, device

    @property
    def in_place(self) -> bool:
        there = self.tensors["values"]
        return there.dtype == torch.float32 and there.device == self.device

    def read(self, span: slice) -> torch.Tensor:
        return self.tensors["values"][span].to(self.device, non_blocking=True).float()  # fp32 on the device: no copy

    def write(self, span: slice, values: torch.Tensor) -> None:
        there = self.tensors["values"][span]
        if there.data_ptr() != values.data_ptr():  # fp32 was changed in place
            there.copy_(values, non_blocking=True)


class Blocks:
    """A residual in int8. Spans begin at a block, and end at one or with the parameter."""

    in_place = False

    def __init__(self, tensors: dict[str, torch.Tensor], device: torch.device, seed: int) -> None:
        self.tensors, self.device = tensors, device
        self._random = torch.Generator(device).manual_seed(seed)

    def read(self, span: slice) -> torch.Tensor:
        codes, scales = (part.to(self.device, non_blocking=True) for part in self._blocks(span))
        return codes.float().mul_(scales[:, None]).view(-1)[: span.stop - span.start]

    def write(self, span: slice, values: torch.Tensor) -> None:
        codes, scales = self._blocks(span)
        if values.numel() < codes.numel():  # the last block is not full
            values = torch.nn.functional.pad(values, (0, codes.numel() - values.numel()))
        rows = values.view(-1, BLOCK)
        largest = rows.abs().amax(1).div_(STEPS)
        scales.copy_(largest, non_blocking=True)
        noise = torch.rand(rows.shape, generator=self._random, device=values.device)
        noise.add_(rows / largest.clamp_(min=torch.finfo(torch.float32).tiny)[:, None]).floor_()
        codes.copy_(noise.clamp_(-STEPS, STEPS), non_blocking=True)

    def _blocks(self, span: slice) -> tuple[torch.Tensor, torch.Tensor]:
        first, last = span.start // BLOCK, -(-span.stop // BLOCK)
        return self.tensors["codes"][first * BLOCK : last * BLOCK].view(-1, BLOCK), self.tensors["scales"][first:last]
