"""Training under a plan on real ranks, with plain PyTorch beside it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from scrimp import SGD, AdamW, Engine, Plan
from tests.run import models
from tests.run.bound import Beside

RATES = {"adamw": AdamW(lr=1e-3), "sgd": SGD(lr=0.1, momentum=0.9)}  # SGD's is large, so that an error of a gradient shows


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Of a rank. `peaks`: of live storages, of each step. `wrong`: of SGD on rank 0, the largest error of each tensor in any step
    as a multiple of its bound."""

    losses: list[float]
    peaks: list[int]
    wrong: dict[str, float] = field(default_factory=dict)


def train(plan: str, name: str, steps: int) -> Trained:
    found = Plan.from_json(plan)
    optimizer, micro_batches = RATES[found.optimizer], 1 if found.schedule is None else found.schedule.micro_batches
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(models.build(name), plan=found, optimizer=optimizer, precision=found.precision, device="cpu")
        beside = Beside(models.build(name), optimizer, micro_batches) if found.optimizer == "sgd" else None
        losses, peaks = [], []
        for step in range(steps):
            args, kwargs = models.batch(name, step)
            losses.append(float(engine.step(*args, **kwargs)))
            peaks.append(engine.ledger.device.live_peak.nbytes)
            if beside is not None:
                state = {key: value.clone() for key, value in engine.iter_state()}
                if dist.get_rank() == 0:
                    beside.check(name, step, losses[-1], state)
                engine.ledger.reset_peak()
    engine.close()
    dist.barrier()
    return Trained(losses=losses, peaks=peaks, wrong=beside.wrong if beside is not None else {})


def plainly(model: nn.Module, name: str, steps: int, micro_batches: int) -> list[float]:
    """The losses of AdamW in one process."""
    spec = RATES["adamw"]
    own = torch.optim.AdamW(model.parameters(), lr=spec.lr, weight_decay=spec.weight_decay)
    losses = []
    for step in range(steps):
        own.zero_grad()
        losses.append(models.backward(model, name, step, micro_batches))
        own.step()
    return losses
