"""`scrimp.ext.hf.Trainer` beside `transformers.Trainer`: the same logs and weights, in less memory than its model data takes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (it is in the dev extra)")

from tests.ext.hf.trainers import BUDGET, KINDS, STEPS, assert_equal, both, model_nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_the_logs_and_weights_of_the_plain_trainer(kind: str, tmp_path: Path) -> None:
    """With a scheduler, weight decay in groups, and clipping, in less memory than plain PyTorch's model data takes."""
    plain, door = both(kind, tmp_path)
    assert_equal(plain, door)
    losses = plain.of("loss")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert door.trainer.engine.ledger.peak_nbytes <= BUDGET < model_nbytes(plain.trainer.model)
