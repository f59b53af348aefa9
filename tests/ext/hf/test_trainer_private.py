"""The private names of transformers and accelerate that the door overrides: there, with the arguments that it counts on."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")

import transformers
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from transformers.trainer import OPTIMIZER_NAME

from scrimp.ext.hf import Trainer, trainer_private
from scrimp.ext.hf.trainer_private import TrainerHooks

OURS = {
    "check_arguments", "norm_of_this_step", "step_was_skipped", "take_loss", "save_state", "load_state", "drop_unfinished_step",
    "_prepared",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name, value in vars(TrainerHooks).items() if inspect.isfunction(value) and name not in OURS]
)
def test_an_overridden_method_has_its_arguments(name: str) -> None:
    theirs = inspect.signature(getattr(transformers.Trainer, name)).parameters
    mine = inspect.signature(getattr(TrainerHooks, name)).parameters
    assert [*mine] == [*theirs]
    assert [parameter.default for parameter in mine.values()] == [parameter.default for parameter in theirs.values()]


@pytest.mark.parametrize("name", ["prepare_model", "backward", "clip_grad_norm_"])
def test_a_replaced_method_of_accelerate_is_there(name: str) -> None:
    assert callable(getattr(Accelerator, name))


def test_the_trainer_calls_what_is_replaced() -> None:
    """Where its source says so: the loss goes to `accelerator.backward`, the norm comes from these two, states are saved here."""
    source = inspect.getsource(transformers.Trainer)
    for call in (
        "self.accelerator.backward(loss", "self._clip_grad_norm(model)", "self._get_grad_norm(model", "self.optimizer.step()",
        "self.accelerator.optimizer_step_was_skipped", "self._save_optimizer_and_scheduler(", "self._load_from_checkpoint(",
        "self._load_optimizer_and_scheduler(", "self._load_best_model()", "self._save(output_dir", "self.args._n_gpu",
    ):  # fmt: skip
        assert call in source, call


def test_the_package_needs_no_transformers() -> None:
    code = "import sys; sys.modules['transformers'] = None; from scrimp.ext.hf import WithinBudget; import scrimp.ext.optim"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_names_of_files() -> None:
    assert trainer_private.OPTIMIZER == OPTIMIZER_NAME


def test_a_skipped_step_is_what_the_trainer_asks_for(tmp_path: Any) -> None:
    from tests.ext.hf.trainers import make

    trainer = make(Trainer, "gpt2", tmp_path, settings={"max_steps": 1})
    trainer.train()
    (optimizer,) = trainer.accelerator._optimizers
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert trainer.accelerator._models == [trainer.model]
    for skipped in (True, False):
        trainer.step_was_skipped(skipped)
        assert trainer.accelerator.optimizer_step_was_skipped is skipped


def called(calls: list[Any], optimizer: Any, *_rest: Any) -> None:
    calls.append(optimizer)


def test_a_torch_optimizer_without_gradients_runs_its_hooks_and_changes_nothing() -> None:
    for cls in (torch.optim.AdamW, torch.optim.SGD):
        parameter, calls = torch.nn.Parameter(torch.ones(3)), list[Any]()
        optimizer = cls([parameter], lr=1.0, fused=True)
        optimizer.register_step_pre_hook(partial(called, calls))
        optimizer.step()
        assert calls == [optimizer]
        assert torch.equal(parameter, torch.ones(3))
        assert not optimizer.state
