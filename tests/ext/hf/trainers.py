"""Tiny models, data and trainers, with and without a budget, and what a run of a trainer shows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import TrainingArguments

from scrimp.ext.hf import Trainer

VOCABULARY, LENGTH = 64, 24
KINDS = ("gpt2", "llama")
BUDGET = 3 << 20  # bytes; below the model data of both, which is 16 bytes a parameter
STEPS = 8

Log = dict[str, float]


def build(kind: str, *, layers: int = 8, dropout: float = 0.0) -> nn.Module:
    """Of 64 channels. GPT-2 has a tied head, Llama has not."""
    transformers.set_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=64, n_layer=layers, n_head=4, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=32, hidden_size=64, intermediate_size=172, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@cache
def _model(kind: str, dropout: float) -> nn.Module:
    return build(kind, dropout=dropout)


def model_of(kind: str, *, dropout: float = 0.0) -> nn.Module:
    return copy.deepcopy(_model(kind, dropout))


def model_nbytes(model: nn.Module) -> int:
    """Weights, gradients and two optimizer states of plain PyTorch, in fp32."""
    return 16 * sum(parameter.numel() for parameter in model.parameters())


@cache
def rows(count: int = 40, *, seed: int = 1) -> list[dict[str, Any]]:
    """Sequences that can be learned: each id is the one before it plus 5. Each has another number of ignored labels."""
    draw = torch.Generator().manual_seed(seed)
    found = []
    for k in range(count):
        start = int(torch.randint(VOCABULARY, (), generator=draw))
        ids = [(start + 5 * i) % VOCABULARY for i in range(LENGTH)]
        found.append({"input_ids": ids, "labels": [-100] * (k % 5) + ids[k % 5 :]})
    return found


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Batches of uneven lengths: as long as the sum of their ids says."""
    length = LENGTH - sum(sample["input_ids"][0] for sample in samples) % 5
    return {key: torch.tensor([sample[key][:length] for sample in samples]) for key in ("input_ids", "labels")}


def collate_alike(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Batches of one length, as a plan takes them."""
    return {key: torch.tensor([sample[key] for sample in samples]) for key in ("input_ids", "labels")}


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "max_steps": STEPS,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 3e-3, "save_strategy": "no",
        "dataloader_pin_memory": False, "warmup_steps": 2, "log_level": "error", "weight_decay": 0.1,
    }  # fmt: skip
    return TrainingArguments(**{**given, **settings})


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run shows: every log without its times, and the weights at its end."""

    trainer: Any
    logs: list[Log]
    state: dict[str, torch.Tensor] = field(repr=False)

    def of(self, key: str) -> list[float]:
        return [log[key] for log in self.logs if key in log]


def run(trainer: Any, *, train: Callable[[Any], Any] = lambda trainer: trainer.train()) -> Run:
    train(trainer)
    engine = getattr(trainer, "engine", None)
    state = dict(trainer.model.state_dict()) if engine is None else engine.state_dict()
    return Run(trainer=trainer, logs=logs_of(trainer), state={key: value.detach().clone() for key, value in state.items()})


def logs_of(trainer: Any) -> list[Log]:
    timed = ("runtime", "per_second", "flos", "preparation_time")
    return [
        {key: value for key, value in log.items() if not any(word in key for word in timed)} for log in trainer.state.log_history
    ]


def make(
    cls: type[Any],
    kind: str,
    folder: Path,
    *,
    model: nn.Module | None = None,
    settings: dict[str, Any] | None = None,
    **keywords: Any,
) -> Any:
    """A trainer of this class; `settings` are of its TrainingArguments."""
    if issubclass(cls, Trainer):
        keywords = {"memory": BUDGET, **keywords}
    keywords = {"train_dataset": rows(), "data_collator": collate, **keywords}
    return cls(model if model is not None else model_of(kind), arguments(folder, **(settings or {})), **keywords)


def both(kind: str, folder: Path, *, dropout: float = 0.0, **given: Any) -> tuple[Run, Run]:
    """The same run by transformers' Trainer and within the budget."""
    runs = []
    for name, cls in (("plain", transformers.Trainer), ("door", Trainer)):
        model = model_of(kind, dropout=dropout)
        keywords = {key: value() if key == "callbacks" else value for key, value in given.items()}
        runs.append(run(make(cls, kind, folder / name, model=model, **keywords)))
    return runs[0], runs[1]


def assert_equal(plain: Run, door: Run) -> None:
    """Every log, and every weight."""
    assert door.logs == plain.logs
    assert_same_weights(plain, door)


def assert_goes_on(whole: Run, resumed: Run) -> None:
    """A resumed run is the uninterrupted one; the last log has the mean loss of the resumed part only."""
    assert resumed.logs[:-1] == whole.logs[:-1]
    assert_same_weights(whole, resumed)


def assert_same_weights(plain: Run, door: Run) -> None:
    assert plain.state.keys() == door.state.keys()
    wrong = [name for name, value in plain.state.items() if not torch.equal(value, door.state[name])]
    assert not wrong, f"{len(wrong)} of {len(plain.state)} differ: {wrong[:5]}"


def tokenizer() -> Any:
    """Of words w1, w2, ...; 0 pads and ends."""
    import tokenizers

    words = {"<pad>": 0, **{f"w{k}": k for k in range(1, VOCABULARY)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<pad>")
