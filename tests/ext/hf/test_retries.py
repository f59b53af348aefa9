"""What a loss function counts on its trainer is there once, however often it is called; and settings without transformers."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from scrimp.ext.hf.retries import Counted
from scrimp.ext.hf.settings import activations_of, precision_of


class Holder:
    def __init__(self) -> None:
        self.tokens, self.name, self.best = 3, "run", None
        self.metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list, loss=[1.0]), "eval": defaultdict(list)}
        self.losses = [0.5]
        self.data = [[1], [2]]

    def count(self) -> None:
        self.tokens += 4
        self.name += "!"
        self.losses.append(1.0)
        self.metrics["train"]["loss"].append(2.0)
        self.metrics["train"]["accuracy"].append(0.1)
        self.metrics["train"]["tokens"] = [float(self.tokens)]


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_counted_once(attempts: int) -> None:
    holder, once = Holder(), Holder()
    once.count()
    metrics, data = holder.metrics, holder.data
    counting = Counted(holder).counting(holder.count)
    for _ in range(attempts):
        counting()
    assert vars(holder) == vars(once)
    assert holder.metrics is metrics
    assert holder.data is data


def given(**settings: Any) -> Any:
    return SimpleNamespace(**{"bf16": False, "fp16": False, "gradient_checkpointing": False, **settings})


@pytest.mark.parametrize(
    ("args", "asked", "precision"),
    [
        (given(), None, "fp32"),
        (given(bf16=True), None, "bf16"),
        (given(fp16=True), None, "fp16"),
        (given(bf16=True), "fp32", "fp32"),
    ],
)
def test_precision(args: Any, asked: str | None, precision: str) -> None:
    assert precision_of(args, asked) == precision


def test_activations() -> None:
    checkpointing: dict[str, Any] = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": None}
    assert activations_of(given(), None) == "auto"
    assert activations_of(given(**checkpointing), None) == "recompute"
    assert activations_of(given(**checkpointing), "auto") == "auto"
    checkpointing["gradient_checkpointing_kwargs"] = {"offload": True}
    assert activations_of(given(**checkpointing), None) == "recompute,offload"
    checkpointing["gradient_checkpointing_kwargs"] = {"every_n_layers": 2}
    with pytest.warns(UserWarning, match="every_n_layers.*activations='auto'"):
        assert activations_of(given(**checkpointing), None) == "recompute"
