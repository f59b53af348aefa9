"""`scrimp.ext.hf.Trainer` beside `transformers.Trainer`: the same logs and weights, in less memory than its model data takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")

import numpy as np
import transformers
from torch import nn
from transformers import TrainerCallback

from scrimp.ext.hf import Trainer, WithinBudget
from tests.ext.hf.trainers import (
    BUDGET,
    KINDS,
    STEPS,
    arguments,
    assert_equal,
    both,
    build,
    collate,
    make,
    model_nbytes,
    model_of,
    rows,
    run,
    tokenizer,
)  # fmt: skip

sample = pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_logs_and_weights_of_the_plain_trainer(kind: str, tmp_path: Path) -> None:
    """With a scheduler, weight decay in groups, and clipping, in less memory than plain PyTorch's model data takes."""
    plain, door = both(kind, tmp_path)
    assert_equal(plain, door)
    losses = plain.of("loss")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert door.trainer.engine.ledger.peak_nbytes <= BUDGET < model_nbytes(plain.trainer.model)


@sample
@pytest.mark.parametrize("accumulate", [3, pytest.param(4, marks=pytest.mark.full)])
def test_accumulation_of_uneven_batches_with_a_short_last_group(kind: str, accumulate: int, tmp_path: Path) -> None:
    """Seven batches an epoch, so that its last step has one batch, or three. Dropout draws the same numbers."""
    settings = {"gradient_accumulation_steps": accumulate, "max_steps": -1, "num_train_epochs": 2}
    plain, door = both(kind, tmp_path, dropout=0.1, settings=settings, train_dataset=rows(14))
    assert len(plain.of("loss")) == 2 * -(-7 // accumulate)
    assert_equal(plain, door)


@sample
@pytest.mark.parametrize(
    "settings",
    [
        {"max_grad_norm": 0.0},
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": True},
        {"neftune_noise_alpha": 5.0},
        {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.0},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_training_arguments(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="without fused=True") if "optim" in settings else none_expected():
        plain, door = both(kind, tmp_path, settings=settings)
    assert_equal(plain, door)


def test_gradient_checkpointing_is_what_the_engine_recomputes(tmp_path: Path) -> None:
    """Not the model, in addition; also when it trains a second time. A keyword of the trainer says otherwise."""
    for keywords, ways in (({}, ("recompute",)), ({"activations": "keep,recompute"}, ("keep", "recompute"))):
        trainer = make(Trainer, "gpt2", tmp_path, settings={"gradient_checkpointing": True, "max_steps": 1}, **keywords)
        for _ in range(2):
            trainer.train()
            assert not trainer.model.is_gradient_checkpointing
        assert trainer.engine._run.planning.ways == ways


@pytest.mark.full
@pytest.mark.parametrize("scheduler", ["linear", "cosine", "constant_with_warmup", "polynomial", "inverse_sqrt"])
def test_schedulers(scheduler: str, tmp_path: Path) -> None:
    plain, door = both("gpt2", tmp_path, settings={"lr_scheduler_type": scheduler})
    assert len({*plain.of("learning_rate")}) > 2
    assert_equal(plain, door)


def test_a_scheduler_that_follows_the_evaluation(tmp_path: Path) -> None:
    """Evaluation in training, and before it; the rate falls when the loss does not."""
    settings = {
        "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0},
        "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "metric_for_best_model": "loss",
    }  # fmt: skip
    plain, door = both("gpt2", tmp_path, settings=settings, eval_dataset=rows(6, seed=2))
    assert len({*plain.of("learning_rate")}) > 2
    assert len(plain.of("eval_loss")) == 1 + STEPS // 2
    assert_equal(plain, door)


def weighted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the user's: not the model's."""
    logits, wanted = outputs["logits"][:, :-1], labels[:, 1:]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum")
    return loss / num_items_in_batch + 1e-4 * logits.square().mean()


@sample
def test_a_loss_function_of_the_users(kind: str, tmp_path: Path) -> None:
    plain, door = both(kind, tmp_path, compute_loss_func=weighted, settings={"gradient_accumulation_steps": 2})
    assert_equal(plain, door)


def accuracy(prediction: Any) -> dict[str, float]:
    guessed = np.argmax(prediction.predictions, -1)[:, :-1]
    return {"accuracy": float((guessed == prediction.label_ids[:, 1:]).mean()), "sum": float(prediction.predictions.sum())}


@sample
def test_predict_with_metrics(kind: str, tmp_path: Path) -> None:
    """Before training, where the engine is built for it, and after it."""
    found = []
    for name, cls in (("plain", transformers.Trainer), ("door", Trainer)):
        trainer = make(cls, kind, tmp_path / name, compute_metrics=accuracy, settings={"max_steps": 2})
        before = trainer.predict(rows(4, seed=2))
        trainer.train()
        after = trainer.predict(rows(4, seed=2))
        metrics = [{key: out.metrics[f"test_{key}"] for key in ("loss", "accuracy", "sum")} for out in (before, after)]
        found.append((metrics, before.predictions, after.predictions))
    (metrics, *logits), (metrics_door, *logits_door) = found
    assert metrics == metrics_door
    assert metrics[0] != metrics[1]
    for mine, theirs in zip(logits_door, logits, strict=True):
        np.testing.assert_array_equal(mine, theirs)


class Asking(TrainerCallback):
    """Generates between steps, with tensors on the model's device."""

    said: list[list[int]]

    def __init__(self) -> None:
        self.said = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        ids = torch.tensor([[3, 8, 13]], device=model.device)
        self.said.append(model.generate(ids, max_new_tokens=4, do_sample=True, pad_token_id=0)[0].tolist())


@sample
def test_generate_between_steps(kind: str, tmp_path: Path) -> None:
    """By a callback, on the model itself, in training mode, as the plain trainer leaves it: dropout and sampling draw numbers."""
    said = []
    runs = []
    for name, cls in (("plain", transformers.Trainer), ("door", Trainer)):
        callback = Asking()
        model = model_of(kind, dropout=0.1)
        runs.append(run(make(cls, kind, tmp_path / name, model=model, callbacks=[callback], settings={"max_steps": 4})))
        said.append(callback.said)
    assert said[0] == said[1]
    assert len(said[0]) == 4
    assert_equal(*runs)


@sample
def test_training_twice(kind: str, tmp_path: Path) -> None:
    """The optimizer's states go on, the schedule begins again."""
    runs = []
    for name, cls in (("plain", transformers.Trainer), ("door", Trainer)):
        trainer = make(cls, kind, tmp_path / name, settings={"max_steps": 3, "gradient_checkpointing": True})
        trainer.train()
        runs.append(run(trainer))
    assert_equal(*runs)


class Stopping(TrainerCallback):
    """Stops between the micro-batches of the second step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 1


def test_a_step_that_a_callback_stops_half_way(tmp_path: Path) -> None:
    """Its gradients are dropped, and the model can be evaluated, saved and trained on."""
    found = []
    for name, cls in (("plain", transformers.Trainer), ("door", Trainer)):
        settings = {"gradient_accumulation_steps": 2, "max_steps": 3}
        trainer = make(cls, "gpt2", tmp_path / name, callbacks=[Stopping()], settings=settings, eval_dataset=rows(4, seed=2))
        trainer.train()
        assert trainer.state.global_step == 1
        losses = [trainer.evaluate()["eval_loss"]]
        trainer.pop_callback(Stopping)
        trainer.train()
        found.append(
            [*losses, trainer.evaluate()["eval_loss"], [log["loss"] for log in trainer.state.log_history if "loss" in log]]
        )
    assert found[0] == found[1]


class OtherTrainer(transformers.Trainer):
    """A trainer of the user's, with its own training step and loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        with torch.no_grad():
            again = model(**inputs).logits.float().square().mean()
        loss = loss + 0 * again
        return (loss, outputs) if return_outputs else loss


class Mixed(WithinBudget, OtherTrainer):
    pass


def test_a_trainer_of_the_users_takes_the_mixin(tmp_path: Path) -> None:
    """It calls the model twice in a step. What it counts on itself is counted once, however often the engine tries a step."""
    plain = run(make(OtherTrainer, "gpt2", tmp_path / "plain"))
    door = run(make(Mixed, "gpt2", tmp_path / "door", memory="2MiB"))
    assert_equal(plain, door)
    assert plain.trainer.count == door.trainer.count == STEPS


def none_expected() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_a_model_that_is_made_anew_for_each_training(tmp_path: Path) -> None:
    """`model_init`: evaluation, a training and another one have an engine each."""
    runs = []
    for name, cls in (("plain", transformers.Trainer), ("door", Trainer)):
        trainer = cls(
            args=arguments(tmp_path / name, max_steps=2), model_init=lambda: build("gpt2", layers=2), train_dataset=rows(),
            eval_dataset=rows(4, seed=2), data_collator=collate, **({"memory": "2MiB"} if cls is Trainer else {}),
        )  # fmt: skip
        before = trainer.evaluate()["eval_loss"]
        first = run(trainer)
        runs.append((before, first, run(trainer)))
    assert runs[0][0] == runs[1][0]
    for plain, door in zip(runs[0][1:], runs[1][1:], strict=True):
        assert_equal(plain, door)


def generated(prediction: Any) -> dict[str, float]:
    return {"ids": float(prediction.predictions.sum())}


class Seq2Seq(WithinBudget, transformers.Seq2SeqTrainer):
    pass


@pytest.mark.full
def test_a_sequence_to_sequence_trainer_that_generates(tmp_path: Path) -> None:
    """T5 with a tied embedding, evaluated by what it generates, with batches of a padding collator."""
    config = transformers.T5Config(
        vocab_size=64,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.1,
        use_cache=False,
    )
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"][: 6 + k % 3]} for k, row in enumerate(rows(20))]
    runs = []
    for name, cls in (("plain", transformers.Seq2SeqTrainer), ("door", Seq2Seq)):
        transformers.set_seed(1)
        model = transformers.T5ForConditionalGeneration(config)
        settings = transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path / name), predict_with_generate=True, generation_max_length=8, eval_strategy="steps",
            eval_steps=2, max_steps=4, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no",
            per_device_train_batch_size=2, per_device_eval_batch_size=2, dataloader_pin_memory=False, log_level="error",
        )  # fmt: skip
        collator = transformers.DataCollatorForSeq2Seq(tokenizer(), model=None, padding=True)
        trainer = cls(
            model, settings, train_dataset=data, eval_dataset=data[:5], data_collator=collator, compute_metrics=generated,
            **({"memory": "4MiB"} if cls is Seq2Seq else {}),
        )  # fmt: skip
        runs.append(run(trainer))
    assert_equal(*runs)
    assert len(runs[0].of("eval_ids")) == 2


def test_an_optimizer_and_a_schedule_of_the_users(tmp_path: Path) -> None:
    """Made before the trainer, from the model's parameters, in groups with rates of their own."""
    runs = []
    for name, cls in (("plain", transformers.Trainer), ("door", Trainer)):
        model = model_of("llama")
        head = [*model.lm_head.parameters()]  # type: ignore[operator, union-attr]
        rest = [parameter for parameter in model.parameters() if all(parameter is not one for one in head)]
        groups = [{"params": rest}, {"params": head, "lr": 1e-4, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=2e-3, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1 / (1 + step), lambda step: 1.0])
        runs.append(run(make(cls, "llama", tmp_path / name, model=model, optimizers=(optimizer, schedule))))
    assert_equal(*runs)
    assert len({*runs[0].of("learning_rate")}) == STEPS
