"""PEFT's adapters and TRL's SFTTrainer within a budget: the logs and weights of the same trainers without one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")
pytest.importorskip("peft", reason="peft is not installed (it is in the dev extra)")

import peft
import transformers
from safetensors.torch import load_file

from scrimp.ext.hf import Trainer, WithinBudget
from tests.ext.hf.trainers import (
    Run,
    arguments,
    assert_equal,
    assert_goes_on,
    make,
    model_nbytes,
    model_of,
    rows,
    run,
    tokenizer,
)  # fmt: skip

CLASSES = (("plain", transformers.Trainer), ("door", Trainer))
LORA_BUDGET = 1800 << 10  # bytes
SFT_BUDGET = 4608 << 10  # TRL computes the loss in chunks of a fixed size, which take 3.8 MiB here


def lora(**settings: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **settings)


def with_lora(**settings: Any) -> Any:
    model = model_of("llama")
    transformers.set_seed(3)
    return peft.get_peft_model(model, lora(**settings))


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.1}, {"modules_to_save": ["lm_head"]}], ids=["dropout", "head"])
def test_lora(settings: dict[str, Any], tmp_path: Path) -> None:
    """Also a resumed run, the adapter's folder, and the best model at the end; in less than the frozen weights take."""
    runs: list[Run] = []
    saving = {
        "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2,
        "load_best_model_at_end": True, "learning_rate": 0.1, "warmup_steps": 1,
    }  # fmt: skip
    given: dict[str, Any] = {"settings": saving, "eval_dataset": rows(4, seed=2)}
    for name, cls in CLASSES:
        more = {"memory": LORA_BUDGET} if cls is Trainer else {}
        trainer = make(cls, "llama", tmp_path / name, model=with_lora(**settings), **given, **more)
        runs.append(run(trainer))
        trainer.save_model(str(tmp_path / name / "saved"))
    plain, door = runs
    assert_equal(plain, door)
    assert door.trainer.engine.ledger.peak_nbytes <= LORA_BUDGET < model_nbytes(plain.trainer.model) / 2
    for place in ("saved", "checkpoint-2"):
        mine, theirs = (load_file(tmp_path / name / place / "adapter_model.safetensors") for name, _ in CLASSES)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert not (tmp_path / "door" / place / "model.safetensors").exists()
    again = make(Trainer, "llama", tmp_path / "door", model=with_lora(**settings), memory=LORA_BUDGET, **given)
    checkpoint = str(tmp_path / "door" / "checkpoint-2")
    assert_goes_on(plain, run(again, train=lambda trainer: trainer.train(resume_from_checkpoint=checkpoint)))


@pytest.fixture
def trl() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        module = pytest.importorskip("trl", reason="trl is not installed (it is in the dev extra)")
        yield module


@pytest.mark.parametrize("adapter", [False, True], ids=["weights", "lora"])
def test_sft_trainer(adapter: bool, trl: Any, tmp_path: Path) -> None:
    """Losses, norms, entropy, accuracy and tokens; the mixin is all it takes."""

    class SFT(WithinBudget, trl.SFTTrainer):  # type: ignore[misc, name-defined]
        pass

    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows(16)])
    runs = []
    for name, cls in (("plain", trl.SFTTrainer), ("door", SFT)):
        settings = arguments(tmp_path / name, max_steps=4, gradient_accumulation_steps=2).to_dict()
        known = {key: settings[key] for key in GIVEN}
        config = trl.SFTConfig(**known, bf16=False, max_length=16, eval_strategy="steps", eval_steps=2)
        model = model_of("llama")
        transformers.set_seed(3)
        more: dict[str, Any] = {"memory": SFT_BUDGET} if cls is SFT else {}
        trainer = cls(
            model, config, train_dataset=data, eval_dataset=data.select(range(4)), processing_class=tokenizer(),
            peft_config=lora() if adapter else None, **more,
        )  # fmt: skip
        runs.append(run(trainer))
    assert {"loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"} <= runs[0].logs[0].keys()
    assert_equal(*runs)


GIVEN = (
    "output_dir", "use_cpu", "report_to", "disable_tqdm", "logging_steps", "max_steps", "per_device_train_batch_size",
    "per_device_eval_batch_size", "learning_rate", "save_strategy", "dataloader_pin_memory", "warmup_steps", "log_level",
    "weight_decay", "gradient_accumulation_steps",
)  # fmt: skip
