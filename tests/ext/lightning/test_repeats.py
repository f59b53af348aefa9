"""A step that the engine repeats counts once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed (it is in the dev extra)")
from scrimp.ext.lightning import Budget
from scrimp.ext.lightning._repeats import Counted
from tests.ext.lightning.models import Tiny, loader, trainer_of
from tests.ext.lightning.test_training import pytestmark  # noqa: F401 - the same filters


class Counts(Tiny):
    """As a user counts in steps."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.total = 0, torch.zeros(())
        self.outputs: list[float] = []
        self.by_kind: dict[str, list[float]] = defaultdict(list)

    def count(self, kind: str, loss: torch.Tensor) -> torch.Tensor:
        RUNS.append(kind)
        self.batches += 1
        self.total += loss.detach()
        self.outputs.append(float(loss.detach()))
        self.by_kind[kind].append(float(loss.detach()))
        return loss

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.count("train", super().training_step(batch, batch_idx))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.count("validate", self.loss(batch))


RUNS: list[str] = []  # of all attempts


def test_attributes_count_once() -> None:
    def run(budget: Budget | None) -> Counts:
        RUNS.clear()
        torch.manual_seed(0)
        module = Counts()
        trainer_of(budget, max_epochs=1).fit(module, loader(), loader(8, seed=1))
        return module

    want, ran = run(None), len(RUNS)
    got = run(Budget("530KiB"))  # of 487 at least; with 600 no step is repeated
    assert len(RUNS) > ran  # some steps ran more than once
    assert (got.batches, float(got.total), got.outputs) == (want.batches, float(want.total), want.outputs)
    assert got.by_kind == want.by_kind


def test_what_is_put_back() -> None:
    module: Any = torch.nn.Module()
    module.register_buffer("mean", torch.zeros(1))
    module.number, module.text, module.none = 1, "a", None
    module.items, module.seen, module.rows = [1, [2]], {1}, {"a": [1], "b": {"c": [2]}}
    module.sum = total = torch.ones(2)
    inner = module.rows["b"]["c"]
    counted = Counted(module)
    kept = counted.now()
    module.number, module.text, module.none = 2, "b", 3
    module.items.append(3)
    module.items[1].append(4)
    module.seen.add(5)
    module.rows["new"] = []
    inner.append(6)
    module.sum += 1
    module.sum = module.sum * 2
    module.mean += 1
    counted.back(kept)
    assert (module.number, module.text, module.none) == (1, "a", None)
    assert (module.items, module.seen, module.rows) == ([1, [2]], {1}, {"a": [1], "b": {"c": [2]}})
    assert module.rows["b"]["c"] is inner
    assert module.sum is total
    assert total.tolist() == [1.0, 1.0]
    assert float(module.mean) == 1.0  # buffers are the engine's
