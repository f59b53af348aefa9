"""What a run needs, in bytes. A lower bound: a run that passes may still not fit, and then the engine says so.

model data = weights + masters + optimizer states          gradients and activations come on top, and are not counted
host       = the part of it that the devices of a machine have no room for
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from scrimp.chunks import Optimizer

MASTER = 4  # bytes a trained parameter, unless the weights are fp32 themselves
SHM_OF_RANK = 32 << 20  # of /dev/shm, by NCCL between GPUs of a machine; assumed, because NCCL does not say


@dataclass(frozen=True, kw_only=True)
class Needs:
    """`checkpoint_nbytes`: of one. `model_nbytes`: of model data on all ranks. `tier_nbytes`: of this machine's disk tier."""

    model_nbytes: int
    host_nbytes: int
    shm_nbytes: int
    checkpoint_nbytes: int
    run_nbytes: int
    tier_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a run: what its bytes follow from. `device_nbytes`: the budget of one rank on a GPU; 0 on a CPU, whose device is the
    host. `replicated`: every rank has all model data. `there`: complete checkpoints that are on disk."""

    world: int
    here: int
    device_nbytes: int
    host_nbytes: int
    cuda: bool
    replicated: bool
    disk: bool
    saves: int
    keep: int
    there: int


def needs_of(numel: int, trained: int, precision: str, optimizer: Optimizer, shape: Shape) -> Needs:
    """`numel`: parameters, `trained`: those among them that are trained."""
    weights = numel * (4 if precision == "fp32" else 2)
    rest = int(trained * ((0 if precision == "fp32" else MASTER) + _state_nbytes(optimizer)))
    share = 1 if shape.replicated else shape.world
    mine_weights, mine_rest = weights * shape.here // share, rest * shape.here // share
    devices = shape.device_nbytes * shape.here
    host = max(0, mine_weights + mine_rest - devices)
    tier = 0
    if shape.disk:
        tier = max(0, min(mine_rest, host - shape.host_nbytes))
        host = max(0, host - mine_rest)
    kept = min(shape.saves, shape.keep + 1)  # a new one is complete before an old one is deleted
    return Needs(
        model_nbytes=weights + rest,
        host_nbytes=host,
        shm_nbytes=SHM_OF_RANK * shape.here if shape.cuda and shape.here > 1 else 0,
        checkpoint_nbytes=weights + rest,
        run_nbytes=(weights + rest) * max(1, kept - shape.there) if shape.saves else 0,
        tier_nbytes=tier,
    )


def numels(model: nn.Module) -> tuple[int, int]:
    """Parameters, and those that are trained. A tied one counts once."""
    every = {id(each): each for each in model.parameters()}.values()
    return sum(each.numel() for each in every), sum(each.numel() for each in every if each.requires_grad)


def _state_nbytes(optimizer: Optimizer) -> float:
    return sum(field.dtype.itemsize / field.every for field in optimizer.fields)
