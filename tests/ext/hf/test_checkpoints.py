"""What the trainer within a budget saves and loads: checkpoints, the best model, folders that `from_pretrained` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")

import transformers
from safetensors import safe_open
from torch import nn

from scrimp.errors import RunError
from scrimp.ext.hf import Trainer
from tests.ext.hf.trainers import Run, assert_equal, assert_goes_on, assert_same_weights, build, make, model_of, rows, run

sample = pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])
CLASSES = (("plain", transformers.Trainer), ("door", Trainer))


@sample
def test_a_resumed_run_is_the_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    """And that of the plain trainer: with dropout, a schedule, accumulation, and a checkpoint within an epoch."""
    settings = {
        "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2,
        "max_steps": 6,
    }  # fmt: skip
    given: dict[str, Any] = {"settings": settings, "train_dataset": rows(20)}
    plain, whole = (run(make(cls, kind, tmp_path / name, model=model_of(kind, dropout=0.1), **given)) for name, cls in CLASSES)
    assert_equal(plain, whole)
    checkpoint = tmp_path / "door" / "checkpoint-3"
    resumed = make(Trainer, kind, tmp_path / "door", model=build(kind, dropout=0.1), **given)
    torch.rand(5)  # the random state does not matter
    assert_goes_on(plain, run(resumed, train=resuming(checkpoint)))


@pytest.mark.full
def test_resuming_with_an_engine_that_was_used(tmp_path: Path) -> None:
    """The trainer evaluates before it resumes, and trains on in the same object afterwards."""
    runs = []
    for name, cls in CLASSES:
        settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        trainer = make(cls, "gpt2", tmp_path / name, settings=settings, eval_dataset=rows(4, seed=2))
        trainer.train()
        trainer.evaluate()
        runs.append(run(trainer, train=lambda trainer: trainer.train(resume_from_checkpoint=True)))
        runs.append(run(trainer, train=resuming(tmp_path / name / "checkpoint-2")))
    assert_equal(runs[0], runs[2])
    assert_equal(runs[1], runs[3])


@sample
def test_the_best_model_at_the_end(kind: str, tmp_path: Path) -> None:
    """The learning rate is so large that the loss rises; the weights are those of the best step, the optimizer goes on."""
    runs = []
    for name, cls in CLASSES:
        settings = {
            "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True,
            "max_steps": 4, "learning_rate": 0.5, "warmup_steps": 3, "save_total_limit": 2,
        }  # fmt: skip
        trainer = make(cls, kind, tmp_path / name, settings=settings, eval_dataset=rows(4, seed=2))
        runs.append(run(trainer))
        assert trainer.state.best_global_step < 4
        runs.append(run(trainer))
    assert_same_weights(runs[0], runs[2])
    assert_same_weights(runs[1], runs[3])
    assert runs[1].of("loss") == runs[3].of("loss")


def files(folder: Path) -> dict[str, Any]:
    """Configuration, and every tensor of a folder."""
    found = {"config": json.loads((folder / "config.json").read_text())}
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {**found, **{name: file.get_tensor(name) for name in file.keys()}}  # noqa: SIM118 - no dict


def assert_same_files(one: Path, other: Path) -> None:
    mine, theirs = files(one), files(other)
    assert mine.keys() == theirs.keys()
    assert mine.pop("config") == theirs.pop("config")
    assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype for name in theirs)


@sample
def test_folders_that_from_pretrained_reads(kind: str, tmp_path: Path) -> None:
    """By `save_model` and by the model's own `save_pretrained`: the plain trainer's files, a tied head once."""
    runs: list[Run] = []
    for name, cls in CLASSES:
        runs.append(run(make(cls, kind, tmp_path / name, settings={"max_steps": 2})))
        runs[-1].trainer.save_model(str(tmp_path / name / "saved"))
        runs[-1].trainer.model.save_pretrained(tmp_path / name / "alone")
    assert_same_files(tmp_path / "door" / "saved", tmp_path / "plain" / "saved")
    assert_same_files(tmp_path / "door" / "alone", tmp_path / "plain" / "alone")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "door" / "saved")
    wrong = [name for name, value in again.state_dict().items() if not torch.equal(value, runs[0].state[name])]
    assert not wrong


def test_a_model_is_saved_in_the_dtype_it_was_loaded_in(tmp_path: Path) -> None:
    """Whatever the precision of the weights on the device."""
    for name, dtype, precision in (("a", torch.float32, "bf16"), ("b", torch.bfloat16, "bf16")):
        trainer = make(
            Trainer, "llama", tmp_path / name, model=model_of("llama").to(dtype), precision=precision, settings={"max_steps": 1}
        )
        trainer.train()
        trainer.save_model(str(tmp_path / name))
        saved = files(tmp_path / name)
        assert saved.pop("config")["dtype"] == str(dtype).removeprefix("torch.")
        assert {tensor.dtype for tensor in saved.values()} == {dtype}


@sample
def test_a_model_on_meta_with_the_weights_of_a_folder(kind: str, tmp_path: Path) -> None:
    """And its checkpoint, resumed by another model on meta, which needs no weights."""
    model = model_of(kind)
    model.save_pretrained(tmp_path / "weights")
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    plain = run(make(transformers.Trainer, kind, tmp_path / "plain", model=model, settings=settings))
    door = run(make(Trainer, kind, tmp_path / "door", model=on_meta(kind), weights=tmp_path / "weights", settings=settings))
    assert_equal(plain, door)
    again = make(Trainer, kind, tmp_path / "door", model=on_meta(kind), settings=settings)
    checkpoint = tmp_path / "door" / "checkpoint-2"
    assert_goes_on(plain, run(again, train=resuming(checkpoint)))


def resuming(checkpoint: Path) -> Callable[[Any], Any]:
    return lambda trainer: trainer.train(resume_from_checkpoint=str(checkpoint))


def on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return build(kind)


@pytest.mark.full
def test_a_checkpoint_of_weights_alone(tmp_path: Path) -> None:
    """As the plain trainer: the weights are loaded, and the optimizer begins anew."""
    runs = []
    for name, cls in CLASSES:
        settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "save_only_model": True}
        run(make(cls, "gpt2", tmp_path / name, settings=settings))
        again = make(cls, "gpt2", tmp_path / name, settings=settings)
        runs.append(run(again, train=resuming(tmp_path / name / "checkpoint-2")))
    assert_equal(*runs)


def test_a_checkpoint_of_the_plain_trainer_is_refused(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    run(make(transformers.Trainer, "gpt2", tmp_path / "plain", settings=settings))
    door = make(Trainer, "gpt2", tmp_path / "door", settings=settings)
    with pytest.raises(RunError, match=r"checkpoint-2 has optimizer\.pt and no folder 'scrimp'.*without resume_from_checkpoint"):
        door.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
