"""The private names of transformers and accelerate that the door needs, and nothing else: each leads to a hook of `WithinBudget`.

`tests/ext/hf/test_trainer_private.py` fails if one of them is gone or means something else.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scrimp._warnings import warn
from scrimp.errors import RunError
from scrimp.ext.hf.engine_model import names_to_save

_Base: Any = object  # a trainer, once the mixin is put before one

STATE = "scrimp"  # the folder of the engine's state in a checkpoint of the trainer
OPTIMIZER = "optimizer.pt"


class TrainerHooks(_Base):  # type: ignore[misc]
    """Overrides of private methods. `WithinBudget` says what each hook does."""

    # Building.

    def create_accelerator_and_postprocess(self) -> None:
        self.check_arguments()
        if self.args.n_gpu > 1:
            warn(
                f"{self.args.n_gpu} GPUs are visible to this process, and the engine uses one: start a rank for each by torchrun"
            )
            self.args._n_gpu = 1
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.prepare_model = self._prepared
        accelerator.backward = self.take_loss
        accelerator.clip_grad_norm_ = _no_gradients

    def _prepared(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        """The model as it is: the engine places it and shards it."""
        if not any(known is model for known in self.accelerator._models):
            self.accelerator._models.append(model)
        return model

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        found["mixed_precision"] = "no"  # the engine computes with weights of its precision; autocast would cast them again
        return found

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the engine brings each layer to the device when it runs."""

    # Steps.

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.norm_of_this_step()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.norm_of_this_step() if grad_norm is None else grad_norm

    def step_was_skipped(self, skipped: bool) -> None:
        """Tell accelerate, so that the trainer leaves the learning rate as it is."""
        for optimizer in self.accelerator._optimizers:
            optimizer._is_overflow = skipped

    # Checkpoints.

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict=self.state_to_save if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # the groups: the torch optimizer has no states
        self.save_state(Path(output_dir) / STATE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / STATE).is_dir():
            return  # `_load_optimizer_and_scheduler` loads weights and states
        if (folder / OPTIMIZER).exists():
            raise RunError(
                f"{folder} has {OPTIMIZER} and no folder {STATE!r}: another trainer wrote it, and the engine cannot read its "
                "optimizer states. To begin with its weights, load the model from that folder and train without "
                "resume_from_checkpoint"
            )
        with self.engine.full_parameters(*names_to_save(self.model)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (Path(checkpoint) / STATE).is_dir():
            self.load_state(Path(checkpoint) / STATE)

    def _load_best_model(self) -> None:
        self.drop_unfinished_step()
        with self.engine.full_parameters(*names_to_save(self.model)) if self.state.best_model_checkpoint else nullcontext():
            super()._load_best_model()

    # What `WithinBudget` has.

    state_to_save: Any

    def check_arguments(self) -> None:
        raise NotImplementedError

    def take_loss(self, loss: torch.Tensor, **kwargs: Any) -> None:
        raise NotImplementedError

    def norm_of_this_step(self) -> torch.Tensor | None:
        raise NotImplementedError

    def save_state(self, folder: Path) -> None:
        raise NotImplementedError

    def load_state(self, folder: Path) -> None:
        raise NotImplementedError

    def drop_unfinished_step(self) -> None:
        raise NotImplementedError


def _no_gradients(*args: Any, **kwargs: Any) -> Any:
    raise RunError(
        "accelerator.clip_grad_norm_(...) has nothing to clip: the engine has the gradients. Give "
        "TrainingArguments(max_grad_norm=...), and the engine clips; the norm is trainer.engine.optimizer.norm"
    )
