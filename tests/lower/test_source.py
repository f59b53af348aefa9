"""The generated source runs as the interpreter does: the same bits, and no more bytes."""

from __future__ import annotations

from random import Random

import pytest
import torch

from scrimp.lower import Generated, Interpreter
from tests.lower.test_interpret import model_of, planned
from tests.support.lowering.run import drawn, on_all_ranks


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "resnet-tiny", "vgg-tiny-bn", "moe-tiny"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_generated_source_gives_the_bits_of_the_interpreter(name: str, seed: int | None) -> None:
    model, batch, _ = model_of(name)
    least = planned(name, "x=2,y=2", "least")
    plan = least if seed is None else drawn(least, Random(seed))
    ours, oracle = (on_all_ranks(plan, least.source.graph, model, batch, each) for each in (Generated, Interpreter))
    for one, other in zip(ours, oracle, strict=True):
        assert one.loss == other.loss
        assert all(torch.equal(each, other.gradients[key]) for key, each in one.gradients.items())
        assert one.peak_nbytes <= other.peak_nbytes
