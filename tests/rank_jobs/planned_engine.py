"""Training under a plan on real ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from scrimp import SGD, AdamW, Engine, Plan, zoo

OPTIMIZERS = {"adamw": lambda: AdamW(lr=1e-3), "sgd": lambda: SGD(lr=1e-2, momentum=0.9)}


def batch_of(name: str, rows: int, settings: dict[str, Any], step: int) -> Any:
    return zoo.example_batch(name, rows, step=step, **settings)


def train(
    plan: str, name: str, settings: dict[str, Any], rows: int, steps: int, **options: Any
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
    """The losses, the parameters after the steps (rank 0), and what the ledger says."""
    found = Plan.from_json(plan)
    torch.manual_seed(0)
    model = zoo.build(name, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = Engine(
            model, plan=found, optimizer=OPTIMIZERS[found.optimizer](), precision=found.precision, device="cpu", **options
        )
        losses = [float(engine.step(*batch_of(name, rows, settings, step))) for step in range(steps)]
    device = engine.ledger.device
    ledger = {"peak": device.live_peak.nbytes, "all": device.peak_nbytes, "now": dict(device.now), "kinds": device.live_peak}
    state = engine.state_dict()
    engine.close()
    dist.barrier()
    return losses, state, ledger
