"""One parameter's update, on flat views.

On the host a kernel of our own does it in one pass over memory, with the bits of torch's (`_native.py`), and on a device
another (`_fused.py`). Without them torch's fused kernels are used tile by tile. Tiles end on multiples of their size counted
from the parameter's own start, so that vector lanes and tails, and with them every bit, are those of one call on the whole
tensor.
"""

from __future__ import annotations

import torch

from scrimp.chunks import _torch_fused
from scrimp.chunks._fused import Fused
from scrimp.chunks._home import Piece
from scrimp.chunks._native import Native, native, takes
from scrimp.chunks._optim import SGD, AdamW, Optimizer, rate

UPDATE_NBYTES = 28  # read and written per parameter: gradient, master, two moments, weight
TILE = 1 << 18  # stays in a core's cache on the host
CUDA_TILE = 1 << 24  # keeps a device busy


def norm(gradient: torch.Tensor) -> torch.Tensor:
    """The 2-norm in fp32, as torch.nn.utils.clip_grad_norm_ takes it of one tensor."""
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm


def stage_numel(device: torch.device, largest_numel: int, fused: Fused | None) -> int:
    return 0 if fused is not None else min(CUDA_TILE if device.type == "cuda" else TILE, largest_numel)


class Updater:
    """Updates what lives on one device. `stage` is the fp32 tile that gradients are cast into, or scaled in; of
    parameters of at most `largest_numel`; with the device's kernel there is none."""

    def __init__(self, device: torch.device, largest_numel: int, fused: Fused | None = None) -> None:
        self.tile = CUDA_TILE if device.type == "cuda" else TILE
        self.stage = torch.empty(stage_numel(device, largest_numel, fused), dtype=torch.float32, device=device)
        self.native = native() if device.type == "cpu" else None
        self.fused = fused

    def apply(
        self, optimizer: Optimizer, step: int, count: int, piece: Piece, scale: torch.Tensor | None, *, own_master: bool
    ) -> None:
        """Update a piece's master and states from its gradient times `scale`, and write its weight anew from the master.

        `step` is the engine's, for the rate; `count` says how often this parameter was updated, this time included."""
        weight = None if own_master else piece.weight
        if self.native is not None and takes(piece.master, piece.states, piece.gradient, weight):
            _whole(self.native, optimizer, step, count, piece, weight, scale)
            return
        if self.fused is not None:
            self.fused.apply(optimizer, rate(optimizer, step), count, piece, weight, scale)
            return
        for start in range(0, piece.master.numel(), self.tile):
            span = slice(start, start + self.tile)
            target, fresh = piece.master[span], piece.gradient[span]
            if fresh.dtype != torch.float32 or scale is not None:
                fresh = self.stage[: target.numel()].copy_(fresh)
            if scale is not None:
                fresh.mul_(scale)
            _torch_fused.update(optimizer, rate(optimizer, step), count, target, fresh, [state[span] for state in piece.states])
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
    if isinstance(optimizer, AdamW):
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
