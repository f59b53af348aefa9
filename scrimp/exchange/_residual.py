"""What a parameter has not sent yet, kept from step to step: in fp32, in bf16, or in 8 bits.

fp32   exact: what was sent and what is kept add up to what was accumulated
bf16   rounded to the nearest: of an addition less than 1/512 of what is there, something is lost
int8   an even grid of 255 steps up to the largest of every 64 elements, rounded up or down at random, so that what is
       kept is right in the mean; the random numbers are the generator's, so that a run can be repeated
"""

from __future__ import annotations

from typing import Protocol

import torch

from scrimp.errors import RunError

KINDS = ("fp32", "bf16", "int8")
BLOCK, STEPS = 64, 127


class Residual(Protocol):
    """Of one parameter. `read` gives fp32 numbers that may be changed; `write` keeps them."""

    tensors: dict[str, torch.Tensor]

    def read(self, span: slice) -> torch.Tensor: ...

    def write(self, span: slice, values: torch.Tensor) -> None: ...


def residual(kind: str, numel: int, device: torch.device, seed: int = 0) -> Residual:
    """All zeros."""
    if kind == "fp32":
        return _Plain(torch.zeros(numel, device=device))
    if kind == "bf16":
        return _Plain(torch.zeros(numel, dtype=torch.bfloat16, device=device))
    if kind == "int8":
        return _Blocks(numel, device, seed)
    raise RunError(f"residual={kind!r} is not possible; there are {', '.join(map(repr, KINDS))}")


def residual_nbytes(kind: str, numel: int) -> int:
    if kind == "int8":
        blocks = -(-numel // BLOCK)
        return blocks * BLOCK + 4 * blocks
    return numel * {"fp32": 4, "bf16": 2}[kind]


class _Plain:
    def __init__(self, values: torch.Tensor) -> None:
        self.tensors = {"values": values}

    def read(self, span: slice) -> torch.Tensor:
        return self.tensors["values"][span].float()  # fp32 is itself

    def write(self, span: slice, values: torch.Tensor) -> None:
        there = self.tensors["values"][span]
        if there.data_ptr() != values.data_ptr():  # fp32 was changed where it is
            there.copy_(values)


class _Blocks:
    """Spans begin on a block, and end on one or with the parameter."""

    def __init__(self, numel: int, device: torch.device, seed: int) -> None:
        blocks = -(-numel // BLOCK)
        codes = torch.zeros(blocks * BLOCK, dtype=torch.int8, device=device)
        self.tensors = {"codes": codes, "scales": torch.zeros(blocks, device=device)}
        self._numel = numel
        self._random = torch.Generator(device).manual_seed(seed)

    def read(self, span: slice) -> torch.Tensor:
        codes, scales = self._blocks(span)
        return (codes.float() * scales[:, None]).view(-1)[: span.stop - span.start]

    def write(self, span: slice, values: torch.Tensor) -> None:
        codes, scales = self._blocks(span)
        rows = torch.zeros(codes.shape, device=values.device)
        rows.view(-1)[: values.numel()].copy_(values)
        scales.copy_(rows.abs().amax(1)).div_(STEPS)
        rows.div_(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None])
        rows.add_(torch.rand(rows.shape, generator=self._random, device=values.device)).floor_()
        codes.copy_(rows.clamp_(-STEPS, STEPS))

    def _blocks(self, span: slice) -> tuple[torch.Tensor, torch.Tensor]:
        first, last = span.start // BLOCK, -(-span.stop // BLOCK)
        return self.tensors["codes"][first * BLOCK : last * BLOCK].view(-1, BLOCK), self.tensors["scales"][first:last]
