"""fp16 with its loss scale, models most of which is frozen, and what is said of large logits."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scrimp import zoo
from scrimp.errors import FitError
from tests.engine.test_engine import adamw, assert_same, batches_of, engine_for, model_of, run, traced_peak
from tests.support.reference import train_bf16, train_fp16, train_fp32

# fp16.


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("name", ["gpt-tiny", "vgg-tiny"])
def test_fp16_is_bit_equal(name: str, clip: float | None) -> None:
    want, losses = train_fp16(model_of(name), list(batches_of(name)), adamw, clip=clip)
    for recompute, device in (("keep", "1GiB"), ("recompute,offload", "1GiB")):
        engine = engine_for(model_of(name), device, precision="fp16", clip_norm=clip, activations=recompute)
        assert run(engine, batches_of(name)) == losses
        assert_same(engine.state_dict(), want)


class Spiky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * factor).float().mean()


def spiky_batches() -> list[Any]:
    """Gradients of some overflow once, of some several times in a row."""
    draw = torch.Generator().manual_seed(0)
    factors = [1.0, 1.0, 60.0, 1.0, 1000.0, 1000.0, 1000.0, 1.0, 1.0, 1.0]
    return [(torch.randn(4, 4, generator=draw), torch.full((4, 1), factor)) for factor in factors]


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_step_whose_gradients_overflow_halves_the_scale(clip: float | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Spiky()
    want, losses = train_fp16(model, spiky_batches(), adamw, clip=clip)
    engine = engine_for(model, precision="fp16", clip_norm=clip)
    scales, got = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, batch in enumerate(spiky_batches()):
            before = engine.state_dict()
            skipped = engine.optimizer.skipped
            got.append(float(engine.step(*batch)))
            scales.append(engine._run.loss_scale.value)
            if engine.optimizer.skipped > skipped:
                assert_same(engine.state_dict(), before)
            if step == 6:
                engine.save(tmp_path / "ckpt")
    assert engine.optimizer.skipped == sum(a != b for a, b in zip([2.0**16, *scales], scales, strict=False)) > 1
    assert scales[-1] == 2.0 ** (16 - engine.optimizer.skipped)
    assert_same(engine.state_dict(), want)
    assert got == losses
    again = engine_for(model, precision="fp16", clip_norm=clip)
    again.load(tmp_path / "ckpt")
    assert (again._run.loss_scale.value, again._run.loss_scale.good) == (scales[6], 0)
    run(again, tuple(spiky_batches()[7:]))
    assert again.optimizer.skipped == engine.optimizer.skipped
    assert_same(again.state_dict(), want)


def test_the_scale_doubles_after_many_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrimp.engine.update.grad_check.GOOD_STEPS", 3)
    torch.manual_seed(0)
    engine = engine_for(Spiky(), precision="fp16")
    seen = []
    for _ in range(6):
        engine.step(*spiky_batches()[0])
        seen.append(engine._run.loss_scale.value)
    assert seen == [2.0**k for k in (16, 16, 17, 17, 17, 18)]


# Mostly frozen.


class Adapted(nn.Module):
    """A frozen matrix, and a small trained one of rank 2 beside it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(dim, dim)
        self.frozen.requires_grad_(False)
        self.down = nn.Linear(dim, 2, bias=False)
        self.up = nn.Linear(2, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.frozen(x) + self.up(self.down(x)))


class Lora(nn.Module):
    def __init__(self, dim: int = 64, plain: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, dim)
        self.embed.requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted(dim) for _ in range(4))
        self.rest = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim)) for _ in range(plain))
        self.rest.requires_grad_(False)
        self.head = nn.Linear(dim, 100)
        self.head.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, *self.rest):
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def lora_batches(count: int = 8) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(0, 100, (2, 8), generator=draw) for _ in range(2)) for _ in range(count)]


def trained_bytes(engine: Any) -> int:
    return sum(
        engine._run.store.shards.trained_numel(k) * engine._run.store.dtype_of(k).itemsize
        for k in range(len(engine._run.store.placements))
    )


@pytest.mark.parametrize("recompute", ["keep", "recompute,offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_mostly_frozen_models_are_bit_equal(precision: str, recompute: str) -> None:
    torch.manual_seed(0)
    model = Lora()
    loop = train_fp32 if precision == "fp32" else train_bf16
    want, losses = loop(model, lora_batches(), adamw)
    probe = engine_for(model, precision=precision, activations=recompute)
    probe.step(*lora_batches()[0])
    least = traced_peak(probe)
    for device in (least, 2 * least, "1GiB"):
        engine = engine_for(copy.deepcopy(model), device, precision=precision, activations=recompute)
        assert run(engine, tuple(lora_batches())) == losses
        assert_same(engine.state_dict(), want)
        assert all(torch.equal(engine.state_dict()[name], want[name]) for name in want if "frozen" in name)


def test_a_frozen_parameter_takes_its_weight_and_no_more() -> None:
    torch.manual_seed(0)
    model = Lora()
    probe = engine_for(copy.deepcopy(model), precision="bf16", activations="recompute,offload")
    probe.step(*lora_batches()[0])
    engine = engine_for(model, traced_peak(probe), precision="bf16")  # so that homes stay on the host
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    slack = 14 * engine._run.store.table.padding
    assert 2 * frozen + 14 * trained <= engine._run.store.host_nbytes() <= 2 * frozen + 14 * trained + slack
    run(engine, tuple(lora_batches(4)))
    before = engine._run.store.traffic.down_nbytes
    engine.step(*lora_batches()[0])
    # What goes down are gradients of what is trained, and of that only what has its home on the host.
    assert 0 <= engine._run.store.traffic.down_nbytes - before <= trained_bytes(engine)


@pytest.mark.parametrize("recompute", ["keep", "recompute,offload"])
def test_frozen_weights_do_not_pile_up_in_backward(recompute: str) -> None:
    """No gradient says that they are through: each moment still needs one layer alone, and each layer comes once."""
    torch.manual_seed(0)
    engine = engine_for(Lora(), precision="bf16", activations=recompute)
    engine.step(*lora_batches()[0])
    needs = [schedule_step.needs for schedule_step in engine._run.residents.trace]
    assert max(map(len, needs)) == 1
    assert all(a != b for a, b in pairwise(needs))


def test_the_schedule_holds_frozen_layers_over_steps() -> None:
    """With room for all weights but not for masters and states, only trained layers come again."""
    torch.manual_seed(0)
    model = Lora()
    engine = engine_for(model, "1GiB", precision="bf16", activations="keep")
    engine._run.planning.rates = type(engine._run.planning.rates)(
        up=1e12, down=1e12, host=1e12, device=1.0
    )  # nobody moves to the device
    run(engine, tuple(lora_batches(4)))
    assert {placement.tier for placement in engine._run.store.placements} == {"host"}
    before = engine._run.store.traffic.up_nbytes
    engine.step(*lora_batches()[0])
    frozen = [k for k, layer in enumerate(engine._run.store.table.layers) if layer.trained == 0 and layer.numel]
    assert all(engine._run.store.resident[k] for k in frozen)
    trained = sum(engine._run.store.nbytes(k) for k in range(len(engine._run.store.placements)) if k not in frozen)
    assert engine._run.store.traffic.up_nbytes - before == trained


def test_all_on_the_device_nothing_moves() -> None:
    torch.manual_seed(0)
    engine = engine_for(Lora(), "1GiB", precision="bf16")
    run(engine, tuple(lora_batches(4)))
    before = copy.copy(engine._run.store.traffic)
    run(engine, tuple(lora_batches(3)))
    assert engine._run.store.traffic == before


# Words when it does not fit.


@pytest.mark.parametrize("room", [0.6, 0.9])
def test_logits_that_set_the_peak_get_a_hint(room: float) -> None:
    torch.manual_seed(0)
    model = zoo.build("gpt-tiny", vocab=2000)
    batch = zoo.example_batch("gpt-tiny", batch=16, step=0, vocab=2000)
    probe = engine_for(model, activations="recompute,offload")
    probe.step(*batch)
    engine = engine_for(model, int(room * traced_peak(probe)))
    with pytest.raises(FitError, match=r"2000\) and .*logits set the peak; scrimp\.chunked_cross_entropy\(hidden"):
        engine.step(*batch)
    small = engine_for(model_of("gpt-tiny"), "60KiB", activations="keep", precision="fp32")
    with pytest.raises(FitError) as caught:
        small.step(*batches_of("gpt-tiny")[0])
    assert "chunked_cross_entropy" not in str(caught.value)
