"""Hugging Face: `Trainer` within a memory budget, and weights as a folder that transformers loads.

In:   a script with `transformers.Trainer`, or a trainer that is built on it (TRL's `SFTTrainer`), and `memory="24GiB"`.
Out:  the same training within the budget: losses, gradient norms, logs, evaluation, checkpoints, callbacks.

    from scrimp.ext.hf import Trainer                       # in place of: from transformers import Trainer

    class SFT(WithinBudget, SFTTrainer): ...                # any other trainer

    within_budget.py    `WithinBudget`: what a trainer does differently, by hooks that say what they are for
    settings.py         which TrainingArguments the door cannot follow, and what the others mean for the engine
    engine_model.py     methods of the model that run inside the engine between steps: `generate`, `save_pretrained`
    retries.py          numbers that `compute_loss` counts on the trainer are counted once, however often a step is tried
    trainer_private.py  the private names of transformers and accelerate that all of this needs
    trainer.py          `Trainer`: the mixin with `transformers.Trainer`
    exports.py          `export`: streams the weights of an engine or a checkpoint into a folder, or into one file

transformers is imported by `trainer.py` only, so the package can be imported without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.ext.hf.exports import export
    from scrimp.ext.hf.trainer import Trainer
    from scrimp.ext.hf.within_budget import WithinBudget

__all__ = ["Trainer", "WithinBudget", "export"]

__getattr__ = lazily(
    __name__,
    {
        "Trainer": "scrimp.ext.hf.trainer",
        "WithinBudget": "scrimp.ext.hf.within_budget",
        "export": "scrimp.ext.hf.exports",
    },
)
