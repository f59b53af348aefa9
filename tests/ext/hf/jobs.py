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


def planned(folder: str, path: str) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and weights of a trainer with a plan, and those of an engine that steps with the same global batches."""
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()))
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()), LOCAL_WORLD_SIZE=str(dist.get_world_size()))
    import scrimp
    from scrimp.ext.hf import Trainer
    from tests.ext.hf.trainers import collate_alike, make, model_of, run

    plan, batches = scrimp.Plan.load(path), list[Any]()

    class Recording(Trainer):
        def _global_batch(self, inputs: Any) -> dict[str, Any]:
            batches.append(super()._global_batch(inputs))
            return batches[-1]

    settings = {"max_steps": 8, "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0.0}
    trainer = make(Recording, "llama", Path(folder), settings=settings, plan=plan, data_collator=collate_alike)
    found = run(trainer)
    engine = scrimp.Engine(
        model_of("llama"), plan=plan, optimizer=scrimp.AdamW(lr=3e-3, weight_decay=0.0), precision="fp32", clip_norm=1.0,
        memory=3 << 20, device="cpu",
    )  # fmt: skip
    return found.of("loss"), [float(engine.step(**batch)) for batch in batches], found.state, engine.state_dict()
