"""What ranks do with Lightning in the tests. They import it when called."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD, BATCH = 2, 4


def rows_of(rank: int | None, count: int = 24) -> torch.Tensor:
    """The training rows. With a rank: those that torch's sampler gives it, which are every second one."""
    from tests.ext.lightning.models import rows

    every = rows(count * WORLD)
    return every if rank is None else every[rank::WORLD]


def train(folder: str, epochs: int, resume: bool = False, memory: str = "2MiB") -> dict[str, Any]:
    """Weights are those of rank 0; with `resume` the run goes on from `folder`, else it ends there."""
    warnings.simplefilter("ignore")
    from torch.utils.data import DataLoader, DistributedSampler

    from scrimp.ext.lightning import Budget
    from tests.ext.lightning.models import Seen, Tiny, loader, rows, trainer_of

    class Validated(Tiny):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)
            self.log("rank", float(self.global_rank), sync_dist=True, reduce_fx="sum")

    torch.manual_seed(dist.get_rank())  # rank 0's weights count
    module = Validated()
    seen = Seen()
    trainer = trainer_of(Budget(memory), seen, max_epochs=epochs, devices=dist.get_world_size())
    every: Any = rows_of(None)
    data = DataLoader(every, batch_size=BATCH, sampler=DistributedSampler(every, shuffle=False))  # Lightning's own would shuffle
    trainer.fit(module, data, DataLoader(rows(16, seed=1), batch_size=4), ckpt_path=folder if resume else None)  # type: ignore[arg-type]
    if not resume:
        trainer.save_checkpoint(folder)
        trainer.save_checkpoint(Path(folder).with_suffix(".weights"), weights_only=True)
    try:
        trainer.predict(module, loader(8))
        refused = ""
    except Exception as error:
        refused = str(error)
    engine = trainer.strategy.engine
    return {
        "losses": seen.losses,
        "logged": seen.logged,
        "weights": engine.state_dict(),
        "host": engine.ledger.host.total_nbytes,
        "ranks": (trainer.global_rank, trainer.world_size, trainer.is_global_zero),
        "refused": refused,
    }
