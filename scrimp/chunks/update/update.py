"""One parameter's update, on flat views.

On the host scrimp's own kernel does it in one pass over memory, with the bits of torch's (`kernels/host_update.py`). On a device
another does (`kernels/device_update.py`). Without them torch's fused kernels run tile by tile. Tiles end at multiples of their
size counted from the parameter's own start, so that vector lanes and tails, and with them every bit, are those of one call on the
whole tensor. int8 states are decoded and encoded tile by tile (`tables/state_codec.py`).
"""

from __future__ import annotations

from typing import assert_never

import torch

from scrimp.chunks.kernels.device_update import Fused
from scrimp.chunks.kernels.host_update import Native, host_kernel, takes, takes_coded
from scrimp.chunks.store.placement import Piece
from scrimp.chunks.tables.optimizers import SGD, AdamW, Optimizer, rate
from scrimp.chunks.tables.state_codec import Coder, coder_numel, padded
from scrimp.chunks.update import torch_fused_private

TILE = 1 << 18  # fits in a core's cache on the host
CUDA_TILE = 1 << 24  # keeps a device busy
CODED_SHARE = 4  # int8 states need more scratch rows, so their tiles are smaller by this factor


def gradient_norm(gradient: torch.Tensor) -> torch.Tensor:
    """The 2-norm in fp32, as torch.nn.utils.clip_grad_norm_ computes it for one tensor."""
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm


def _tile_numel(device: torch.device, state: str) -> int:
    return (CUDA_TILE if device.type == "cuda" else TILE) // (1 if state == "fp32" else CODED_SHARE)


def stage_numel(device: torch.device, largest_numel: int, fused: Fused | None, state: str = "fp32") -> int:
    """Scratch elements: a tile's gradients, and the coder's rows; none with the device kernel."""
    if fused is not None:
        return 0
    tile = min(_tile_numel(device, state), largest_numel)
    return tile if state == "fp32" else padded(tile) + coder_numel(tile)


class Updater:
    """Updates tensors on one device. `stage` is the fp32 scratch tile in which gradients are cast or scaled, for parameters of at
    most `largest_numel`. For int8 states it has the coder's rows too. With the device kernel there is none."""

    def __init__(self, device: torch.device, largest_numel: int, fused: Fused | None = None, state: str = "fp32") -> None:
        self.tile = _tile_numel(device, state)
        self.stage = torch.empty(stage_numel(device, largest_numel, fused, state), dtype=torch.float32, device=device)
        coded = state != "fp32" and fused is None
        self.coder = Coder(self.stage[padded(min(self.tile, largest_numel)) :]) if coded else None
        self.native = host_kernel() if device.type == "cpu" else None
        self.fused = fused

    def apply(
        self, optimizer: Optimizer, step: int, count: int, piece: Piece, scale: torch.Tensor | None, *, own_master: bool
    ) -> None:
        """Update a piece's master and states from its gradient times `scale`, then rewrite its weight from the master.

        `step` is the engine's, for the learning rate. `count` is the parameter's number of updates, this one included."""
        weight = None if own_master else piece.weight
        fits = takes if self.coder is None else takes_coded
        if self.native is not None and fits(piece.master, piece.states, piece.gradient, weight):
            _whole(self.native, optimizer, step, count, piece, weight, scale)
            return
        if self.fused is not None:
            self.fused.apply(optimizer, rate(optimizer, step), count, piece, weight, scale)
            return
        for start in range(0, piece.master.numel(), self.tile):
            span = slice(start, min(start + self.tile, piece.master.numel()))
            target, fresh = piece.master[span], piece.gradient[span]
            if fresh.dtype != torch.float32 or scale is not None:
                fresh = self.stage[: target.numel()].copy_(fresh)
            if scale is not None:
                fresh.mul_(scale)
            states = [state[span] for state in piece.states] if self.coder is None else self.coder.decode(piece.states, span)
            torch_fused_private.update(optimizer, rate(optimizer, step), count, target, fresh, states)
            if self.coder is not None:
                self.coder.encode(piece.states, span, place=piece.inside.start + start, count=count)
            if weight is not None:
                weight[span].copy_(target)


def _whole(
    kernel: Native,
    optimizer: Optimizer,
    step: int,
    count: int,
    piece: Piece,
    weight: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> None:
    factor = None if scale is None else float(scale)
    lr, threads = float(rate(optimizer, step)), torch.get_num_threads()
    if isinstance(optimizer, AdamW) and optimizer.state != "fp32":
        kernel.adamw_coded(
            piece.master, piece.states, piece.gradient, weight, factor, lr=lr, beta1=optimizer.betas[0], beta2=optimizer.betas[1],
            eps=optimizer.eps, weight_decay=optimizer.weight_decay, count=count, place=piece.inside.start, threads=threads,
        )  # fmt: skip
    elif isinstance(optimizer, AdamW):
        m, v = piece.states
        kernel.adamw(
            piece.master, m, v, piece.gradient, weight, factor, lr=lr, beta1=optimizer.betas[0], beta2=optimizer.betas[1],
            eps=optimizer.eps, weight_decay=optimizer.weight_decay, count=count, threads=threads,
        )  # fmt: skip
    elif isinstance(optimizer, SGD):
        kernel.sgd(
            piece.master, piece.states[0] if piece.states else None, piece.gradient, weight, factor,
            lr=lr, momentum=optimizer.momentum, dampening=optimizer.dampening, weight_decay=optimizer.weight_decay,
            nesterov=optimizer.nesterov, count=count, threads=threads,
        )  # fmt: skip
    else:
        assert_never(optimizer)
