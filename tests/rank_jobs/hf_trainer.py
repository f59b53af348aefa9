"""What ranks do in the tests of the trainer within a budget."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def trained(folder: str, door: bool, settings: dict[str, Any], keywords: dict[str, Any], resume: str | None = None) -> Result:
    """Logs and weights of one rank's trainer, within a budget or under DistributedDataParallel."""
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()))
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()), LOCAL_WORLD_SIZE=str(dist.get_world_size()))
    import transformers

    from scrimp.ext.hf import Trainer
    from tests.ext.hf.trainers import make, rows, run

    given = {"eval_dataset": rows(8, seed=2), "settings": settings, **keywords}
    trainer = make(Trainer if door else transformers.Trainer, "llama", Path(folder), **given)
    assert trainer.args.world_size == dist.get_world_size()
    found = run(trainer, train=lambda trainer: trainer.train(resume_from_checkpoint=resume))
    trainer.save_model(str(Path(folder) / "saved"))
    return found.logs, found.state
