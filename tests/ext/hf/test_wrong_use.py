"""What the trainer within a budget cannot do is said, with what to do instead; nothing is ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")

import transformers
from transformers import TrainerCallback

from scrimp.errors import FitError, RunError
from scrimp.exchange import Sparse
from scrimp.ext.hf import Trainer, WithinBudget
from tests.ext.hf.trainers import STEPS, arguments, make, model_of, rows, run


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"torch_compile": True}, r"torch_compile=True\) is not possible.*does not run compiled layers"),
        ({"auto_find_batch_size": True}, r"auto_find_batch_size=True\).*FitError names the least budget"),
        ({"bf16_full_eval": True}, r"bf16_full_eval=True\).*engine's weights are fp32.*precision='bf16'"),
    ],
)
def test_training_arguments_that_the_engine_cannot_follow(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=words):
        make(Trainer, "gpt2", tmp_path, settings=settings)


@pytest.mark.parametrize("optim", ["adafactor", "rmsprop", "adagrad"])
def test_optimizers_that_scrimp_lacks(optim: str, tmp_path: Path) -> None:
    trainer = make(Trainer, "gpt2", tmp_path, settings={"optim": optim})
    with pytest.raises(RunError, match=r"is an optimizer that scrimp does not have; it has torch\.optim\.AdamW .*SGD"):
        trainer.train()


def test_adamw_without_fused_is_said_to_differ(tmp_path: Path) -> None:
    trainer = make(Trainer, "gpt2", tmp_path, settings={"optim": "adamw_torch", "max_steps": 1})
    with pytest.warns(UserWarning, match=r"last bits of weights differ.*optim='adamw_torch_fused'"):
        trainer.train()


def test_a_budget_that_is_too_small_names_the_least(tmp_path: Path) -> None:
    with pytest.raises(FitError, match="The least that works for this batch is"):
        make(Trainer, "gpt2", tmp_path, memory="200KiB").train()


def test_sparse_with_accumulation(tmp_path: Path) -> None:
    trainer = make(Trainer, "gpt2", tmp_path, exchange=Sparse(density=0.1), settings={"gradient_accumulation_steps": 2})
    with pytest.raises(RunError, match=r"gradient_accumulation_steps=2 is not possible.*Dense\(\)"):
        trainer.train()


class Reading(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


def test_a_callback_that_would_read_gradients(tmp_path: Path) -> None:
    trainer = make(Trainer, "gpt2", tmp_path, callbacks=[Reading()], settings={"max_steps": 1})
    with pytest.warns(UserWarning, match=r"Reading\.on_pre_optimizer_step finds no gradients.*engine\.optimizer\.norm"):
        trainer.train()


class ByHand(transformers.Trainer):
    """Does not leave the backward to accelerate."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return self.compute_loss(model, inputs).detach()


class Wrong(WithinBudget, ByHand):
    pass


class Outside(Trainer):
    """Overrides the training step of the mixin, so that it does not run inside the engine."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()


class Clipping(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        return loss


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Wrong, r"Wrong\.training_step did not call self\.accelerator\.backward\(loss\)"),
        (Outside, r"called outside of the engine.*engine\.step"),
        (Clipping, r"nothing to clip.*TrainingArguments\(max_grad_norm=\.\.\.\)"),
    ],
)
def test_trainers_that_do_not_fit(cls: type[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=words):
        make(cls, "gpt2", tmp_path, settings={"max_steps": 1}, memory="3MiB").train()


def test_a_model_in_fewer_bits_than_the_engine_trains_with(tmp_path: Path) -> None:
    model = model_of("llama").to(torch.bfloat16)
    trainer = make(Trainer, "llama", tmp_path, model=model, settings={"max_steps": 1})
    with pytest.warns(UserWarning, match=r"weights are torch\.bfloat16.*neither bf16 nor fp16.*precision='bf16'"):
        trainer.train()


@pytest.mark.parametrize(("settings", "precision"), [({"bf16": True}, "bf16"), ({"fp16": True}, "fp16"), ({}, "fp32")])
def test_the_precision_of_training_arguments(settings: dict[str, Any], precision: str, tmp_path: Path) -> None:
    """Weights on the device have it, and nothing is cast a second time: the loss is that of a step by the engine alone."""
    if precision == "fp16":  # the arguments refuse it on the CPU
        return
    trainer = make(Trainer, "llama", tmp_path, settings={**settings, "max_steps": 2})
    trainer.train()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {
        {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    }
    assert trainer.accelerator.mixed_precision == "no"


class Spoiled(torch.nn.Module):
    """A loss that is not finite in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model_of("gpt2")
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.inner(input_ids=input_ids, labels=labels).loss
        self.calls += self.training
        return {"loss": loss * float("nan") if self.calls == 3 else loss}


def test_a_step_that_is_not_finite(tmp_path: Path) -> None:
    """The engine skips it and says so; the schedule waits, and the log has the norm that was found."""
    trainer = make(Trainer, "gpt2", tmp_path, model=Spoiled(), memory="64MiB", settings={"logging_nan_inf_filter": False})
    with pytest.warns(UserWarning, match="step 2: gradient of .* is not finite; the update is skipped"):
        logs = run(trainer).logs
    assert trainer.engine.optimizer.skipped == 1
    norms, rates = ([log[key] for log in logs if key in log] for key in ("grad_norm", "learning_rate"))
    assert [norm != norm for norm in norms] == [step == 2 for step in range(STEPS)]
    assert rates[2] == rates[3] != rates[4]


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model(input_ids=torch.zeros(1, 4, dtype=torch.long)),
        lambda model: model.state_dict(),
        lambda model: model.transformer.wte.weight.sum(),
        lambda model: torch.save(model.lm_head.state_dict(), "/dev/null"),
    ],
)
def test_the_model_between_steps(use: Callable[[Any], Any], tmp_path: Path) -> None:
    trainer = make(Trainer, "gpt2", tmp_path, settings={"max_steps": 1})
    trainer.train()
    assert trainer.model.device == torch.device("cpu")
    with pytest.raises(RunError, match=r"engine\."):
        use(trainer.model)


def test_another_optimizer_for_the_same_model(tmp_path: Path) -> None:
    trainer = make(Trainer, "gpt2", tmp_path, settings={"max_steps": 1})
    trainer.train()
    trainer.optimizer = None
    with pytest.raises(RunError, match=r"optimizer was replaced by another AdamW.*build a new trainer"):
        trainer.train()


def test_arguments_of_the_trainer_are_still_checked(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="memry"):
        Trainer(model_of("gpt2"), arguments(tmp_path), train_dataset=rows(), memry="3MiB")
